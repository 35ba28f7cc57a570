"""What a checkpoint costs: the share of a training's time, at one a minute.

    mpiexec -n 2 python benchmarks/checkpoint.py

Steps of Allreduce with a model of 100 MB of float32, and of SGD with momentum, which is as much
again on each rank. Rounds with a checkpoint and without take turns: a round is as many steps as
take longer than the writing. What a checkpoint takes is the difference of their times: the average
and the copies, for which the training waits, and what the writing takes from the steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from common import figure, parser, quartiles, report
from mpi4py import MPI

from wagma import checkpoint
from wagma.optim import Allreduce

MINUTE = 60.0
BOUND = 0.02
LAYERS, WIDTH = 25, 1000  # 25 million parameters
SAVING, PLAIN = "with a checkpoint", "without"


def steps(optimizer, model, batch, count):
    """Make steps."""
    for _ in range(count):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def timed(comm, optimizer, model, batch, count, saver):
    """Return the seconds of steps on the slowest rank, and those of them in which they waited."""
    comm.Barrier()
    began, waited = time.perf_counter(), 0.0
    if saver is not None:
        saver.begin()
        waited = time.perf_counter() - began
    steps(optimizer, model, batch, count)
    taken = time.perf_counter() - began
    if saver is not None:
        saver.finish()
        late = time.perf_counter() - began - taken
        if comm.rank == 0 and late > 0.1:
            print(f"# the writing took {late:.1f} s longer than the round", flush=True)
    return comm.allreduce(taken, op=MPI.MAX), comm.allreduce(waited, op=MPI.MAX)


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7, help="of each kind (default 7)")
    arguments.add_argument("--steps", type=int, default=12, help="in a round (default 12)")
    arguments.add_argument("--directory", help="for the checkpoints (default: a temporary one)")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(64, WIDTH)
    times = {PLAIN: [], SAVING: []}
    waits = []
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
        Allreduce(model, sgd) as averager,
    ):
        saver = checkpoint.Saver(comm.bcast(directory), averager, keep=1)
        timed(comm, sgd, model, batch, 2, saver)
        for _ in range(arguments.rounds):
            for kind, each in ((PLAIN, None), (SAVING, saver)):
                taken, waited = timed(comm, sgd, model, batch, arguments.steps, each)
                times[kind].append(taken)
                waits += [waited] if each else []
        comm.Barrier()
    if comm.rank == 0:
        pairs = zip(times[SAVING], times[PLAIN])
        found = quartiles([(saving - plain) / MINUTE for saving, plain in pairs])
        name = f"{SAVING} a minute, 100 MB: share of the time"
        rows = [{"kind": kind, "seconds": taken} for kind, taken in times.items()]
        rows.append({"kind": "waiting for average and copies", "seconds": waits})
        seconds = ", ".join(f"{kind} {statistics.median(of):.2f} s" for kind, of in times.items())
        waited = statistics.median(waits)
        print(f"# {arguments.steps} steps: {seconds}; of it waiting {waited:.2f} s", flush=True)
        figures = [figure(name, found, BOUND)]
        report(arguments, "checkpoint", comm.size, rows, ratios={name: found}, figures=figures)


if __name__ == "__main__":
    main()
