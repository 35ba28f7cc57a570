"""What a timeline costs: calls and steps while it is recorded, relative to those without it.

    mpiexec -n 4 python benchmarks/timeline.py

Calls of `GroupAllreduce` on 4 KiB in shared memory, all ranks in a row, and steps of 10 ms, which
each rank works before its call and tells by a span. Recording is switched on and off in turns; the
figures are medians of the ratios, round by round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial

import numpy as np
from common import figure, parser, ratio, report, take_turns, time_warm
from mpi4py import MPI

from collectives import GroupAllreduce, timeline
from collectives.timeline import span

ON, OFF = "recorded", "not recorded"
CALL, STEP = "call, 4 KiB", "step, 10 ms"
LENGTH = 1024  # of the vector, float32
IN_A_ROW = 20  # calls that are timed as one
WORK = 0.01  # seconds of a step
BOUNDS = {CALL: 1.01, STEP: 1.001}


def in_a_row(call):
    for _ in range(IN_A_ROW):
        call()


def step(call):
    """Work, and make a call."""
    with span("compute"):
        time.sleep(WORK)
    call()


def timed(comm, directory, call, what, records, calls, first):
    """Return the seconds per step, or per calls in a row, on the slowest rank, recorded or not."""
    made = in_a_row if what == CALL else step
    if not records:
        return time_warm(comm, partial(made, call), calls)
    with timeline.recorded(directory, comm):
        return time_warm(comm, partial(made, call), calls)


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=41, help="at most (default 41)")
    arguments.add_argument("--seconds", type=float, default=60.0, help="for each (default 60)")
    arguments = arguments.parse_args()
    rows, found = [], {}
    vector = np.zeros(LENGTH, np.float32)
    with (
        tempfile.TemporaryDirectory() as directory,
        GroupAllreduce(
            comm, vector, group_size=comm.size, sync_period=10**9, wait="group", transport="shared"
        ) as collective,
    ):
        directory, call = comm.bcast(directory), partial(collective, vector)
        for what in (CALL, STEP):
            variants = {
                name: partial(timed, comm, directory, call, what, name == ON) for name in (OFF, ON)
            }
            times = take_turns(comm, variants, arguments.rounds, arguments.seconds)
            if comm.rank == 0:
                scale = 1e6 / (IN_A_ROW if what == CALL else 1)
                medians = {name: scale * statistics.median(each) for name, each in times.items()}
                rows.append({"of": what, "rounds": len(times[ON]), "microseconds": medians})
                found[f"{what}: {ON} ÷ {OFF}"] = ratio(times[ON], times[OFF])
                cells = [f"{name}: {value:.2f} µs" for name, value in medians.items()]
                print(f"# {what}: {', '.join(cells)}", flush=True)
        comm.Barrier()
    if comm.rank == 0:
        figures = [
            figure(f"{what}: {ON} ÷ {OFF}", found[f"{what}: {ON} ÷ {OFF}"], bound)
            for what, bound in BOUNDS.items()
        ]
        report(arguments, "timeline", comm.size, rows, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
