"""Training steps with and without overlap: how much of the averaging is hidden by computing?

    mpiexec -n 4 python benchmarks/overlap.py

A model of 16 MiB of float32 with plain SGD. A gradient takes 40 ms: of sleep, which stands for an
accelerator's work; of sleep of 20 to 60 ms, drawn anew for each rank and step; or of this core's
own work, with which the progress thread competes if cores are few. Time per step of the slowest
rank, including one synchronization in ten steps; medians over rounds in which all variants take
turns, and of the ratios to the same without overlap in the same round.
"""

import random
import statistics
import time

import torch
from common import parser, ratio, report, time_calls
from mpi4py import MPI
from torch import nn

from wagma.optim import WAGMA

PERIOD = 10  # steps; also the length of the warm-up


def work(seconds):
    """Use `seconds` of a core."""
    end = time.thread_time() + seconds
    matrix = torch.ones(128, 128)
    while time.thread_time() < end:
        matrix @ matrix


def compute(kind, seconds, chance):
    """Spend the time of a gradient."""
    if kind == "work":
        work(seconds)
    else:
        time.sleep(seconds * (chance.uniform(0.5, 1.5) if kind == "uneven sleep" else 1))


def time_steps(comm, arguments, kind, **settings):
    """Return the seconds per step of the slowest rank."""
    model = nn.ParameterList([torch.zeros(arguments.mib * 2**18)])
    model[0].grad = torch.ones_like(model[0])
    chance = random.Random(comm.rank)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings.update(group_size=arguments.group_size, sync_period=PERIOD)
    with WAGMA(model, sgd, comm=comm, **settings):

        def step():
            compute(kind, arguments.compute_ms / 1000, chance)
            sgd.step()

        time_calls(comm, step, PERIOD)
        return time_calls(comm, step, PERIOD)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--mib", type=int, default=16)
    arguments.add_argument("--group-size", type=int, help="default: WAGMA's")
    arguments.add_argument("--compute-ms", type=float, default=40.0)
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    variants = [(w, k) for w in ("group", "nobody") for k in ("sleep", "uneven sleep", "work")]
    times = {(*variant, overlap): [] for variant in variants for overlap in (False, True)}
    for _ in range(arguments.rounds):
        for (wait, kind, overlap), measured in times.items():
            measured.append(time_steps(comm, arguments, kind, wait=wait, overlap=overlap))
    if comm.rank:
        return
    print(
        f"# {comm.size} ranks, {arguments.mib} MiB, {arguments.compute_ms:g} ms a gradient, "
        f"slowest rank's time per step, median of {arguments.rounds} rounds"
    )
    print(f"{'wait':8} {'gradient':14} {'without':>10} {'overlap':>10}  ratio")
    results, ratios = {}, {}
    for wait, kind in variants:
        without, overlapped = (times[wait, kind, overlap] for overlap in (False, True))
        medians = [statistics.median(values) for values in (without, overlapped)]
        name = f"wait={wait}, {kind}"
        results[name] = dict(zip(("without_s", "overlap_s"), medians))
        ratios[f"{name}: overlap ÷ without"] = found = ratio(overlapped, without)
        shown = " ".join(f"{1e3 * seconds:7.1f} ms" for seconds in medians)
        print(f"{wait:8} {kind:14} {shown}  {found['median']:.2f}")
    report(arguments, "overlap", comm.size, results, ratios=ratios)


if __name__ == "__main__":
    main()
