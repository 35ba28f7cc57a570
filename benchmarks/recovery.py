"""A rank's process is killed: how long until the others have made their next step?

    python benchmarks/recovery.py

Under Open MPI's `mpiexec --with-ft ulfm` only. In each round and with each method a job trains a
model of 25 M parameters; after some steps one of its ranks kills itself. The time is from then to
the end of the next step of the last of the others; of it, `told` is from when a rank noticed until
it had another collective. Steps with survive=True are compared with those without, before that.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import figure, mpiexec, parser, quartiles, ratio, report

BOUND = 2.0  # seconds
METHODS = {"WAGMA": {}, "LocalSGD": {"sync_period": 4}, "Allreduce": {}}
STEPS = 6


def step(model, optimizer):
    for each in model:
        each.grad.fill_(1e-3)
    optimizer.step()


def train(name, parameters, victim, folder):
    """Be a rank of a job: measure steps, then lose a rank; rank by rank write what was measured."""
    import torch
    from mpi4py import MPI

    from wagma import optim

    torch.set_num_threads(1)
    comm, told, measured = MPI.COMM_WORLD, [], {}
    me = comm.rank
    for survive in (False, told.append):
        model = torch.nn.ParameterList([torch.zeros(parameters)])
        model[0].grad = torch.ones_like(model[0])
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        averager = getattr(optim, name)(model, sgd, survive=survive, **METHODS[name])
        step(model, sgd)
        averager.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            step(model, sgd)
        averager.synchronize()
        measured["with" if survive else "without"] = (time.perf_counter() - began) / STEPS
        if not survive:
            averager.close()
    if me == victim:
        (folder / "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    while not told:
        step(model, sgd)
    step(model, sgd)
    after = time.time() - float((folder / "death").read_text())
    averager.close()
    measured |= {"after": after, "told": told[0].seconds}
    (folder / f"rank-{me}").write_text(json.dumps(measured))


def measure(arguments, name, victim):
    """Run a job; return what its slowest rank has measured, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *mpiexec(), "--with-ft", "ulfm", "-n", str(arguments.ranks),
            sys.executable, __file__, "--job", name, str(victim), folder,
            "--parameters", str(arguments.parameters),
        ]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("rank-*")]
    return {key: max(each[key] for each in ranks) for key in ranks[0]}


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--parameters", type=int, default=25_000_000)
    arguments.add_argument("--job", nargs=3, help="be a rank of a job: method, victim, directory")
    arguments = arguments.parse_args()
    if arguments.job:
        name, victim, folder = arguments.job
        train(name, arguments.parameters, int(victim), Path(folder))
        return
    del arguments.job
    found = {name: [] for name in METHODS}
    for number in range(arguments.rounds):
        for name, rounds in found.items():
            rounds.append(measure(arguments, name, number % arguments.ranks))
    print(
        f"# {arguments.ranks} ranks, {arguments.parameters:,} parameters, "
        f"seconds of the slowest rank, median of {arguments.rounds} rounds"
    )
    print(f"{'method':10} {'after death':>12} {'of it told':>12} {'step':>8} {'survive':>8}")
    results, ratios, figures = {}, {}, []
    for name, rounds in found.items():
        of = {key: [each[key] for each in rounds] for key in rounds[0]}
        results[name] = {key: quartiles(values) for key, values in of.items()}
        shown = {key: statistics.median(values) for key, values in of.items()}
        print(
            f"{name:10} {shown['after']:10.3f} s {shown['told']:10.3f} s "
            f"{shown['without']:6.3f} s {shown['with']:6.3f} s"
        )
        ratios[f"{name}: step with survive ÷ without"] = ratio(of["with"], of["without"])
        worst = max(of["after"])
        figures.append(figure(f"{name}: seconds from a death to the next step", worst, BOUND))
    report(arguments, "recovery", arguments.ranks, results, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
