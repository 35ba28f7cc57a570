"""Latency of a controller whose rank computes: groups of the ranks that are ready first.

    mpiexec -n 3 python benchmarks/controller_latency.py

Rank 0's engine runs the controller, and its application is in no call. Ranks 1 and 2 call; in turn
one of them calls later, when the other has long been ready. Measured is the later rank's call, of 4
numbers: its ready signal, the controller's message to both, and their average. That is more than
the time from the last ready signal to the notification, which must be below 1 ms in the median.
Rank 0's main thread sleeps, multiplies matrices, or spins in a Python loop, which holds the GIL for
5 ms at a time.
"""

import time

import numpy as np
from common import figure, parser, quartiles, report
from mpi4py import MPI

import collectives

BOUND = 1e-3  # seconds
SPAN = 0.02


def sleep(end):
    time.sleep(max(0, end - time.perf_counter()))


def multiply(end):
    matrix = np.ones((200, 200))
    while time.perf_counter() < end:
        matrix @ matrix


def spin(end):
    while time.perf_counter() < end:
        pass


KINDS = {"sleeps": sleep, "multiplies matrices": multiply, "spins in Python": spin}


def measure(comm, kind, calls):
    """Return the seconds of each call of the rank that was ready last, on rank 0."""
    vector = np.zeros(4)
    seconds = []
    with collectives.ReadyGroupAllreduce(comm, vector, group_size=2) as collective:
        for call in range(calls):
            comm.Barrier()
            if comm.rank == 0:
                KINDS[kind](time.perf_counter() + SPAN)
                continue
            last = comm.rank == 1 + call % 2
            if last:
                time.sleep(SPAN / 4)
            began = time.perf_counter()
            result = collective(vector)
            if result.group != (1, 2):
                raise ArithmeticError(f"group {result.group}, not of ranks 1 and 2")
            if last:
                seconds.append(time.perf_counter() - began)
    return [each for of in comm.gather(seconds) or [] for each in of]


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=300)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    if comm.size != 3:
        raise SystemExit("start it with 3 ranks")
    results, figures = {}, []
    for kind in KINDS:
        seconds = measure(comm, kind, arguments.calls)
        if comm.rank == 0:
            results[kind] = quartiles(seconds)
            print(f"{kind:<22}{1e6 * results[kind]['median']:8.0f} µs in the median", flush=True)
            figures.append(figure(f"rank 0 {kind}: seconds", results[kind], BOUND))
    if comm.rank == 0:
        report(arguments, "controller-latency", comm.size, results, figures=figures)


if __name__ == "__main__":
    main()
