"""Time of a late call: what a rank does whose version others have executed, beside a memcpy.

    mpiexec -n 2 python benchmarks/late_call.py

Rank 0 calls first, and takes part for all others, which then call one after the other. A late call
publishes the change since the last one, and returns the mean with that change; nobody waits.
Vectors of float32, shared memory, the conserving rule; in windows and elsewhere. memcpy is a copy
of such a vector by rank 1 alone. The calls take turns in every round; the first rounds are
discarded. The table has medians over the rounds, and a ratio is the median of the ratios round by
round.
"""

import time
from statistics import median

import numpy as np
from common import figure, machine, parser, ratio, ratio_label, report
from mpi4py import MPI

from collectives import GroupAllreduce, empty

SIZES_KIB = (64, 1024, 16 * 1024, 100 * 1024)
LATE = 1  # the rank whose calls are timed
WARM_UP = 3
LATE_CALLS = ("late", "window-late")
# Of a late call ÷ memcpy, by number of ranks and size: half of what it was on an AMD EPYC before
# one pass did what three passes had done (7.7, 5.9; 8.1, 5.7).
BOUNDS = {2: {16 * 1024: 3.8, 100 * 1024: 3.0}, 4: {16 * 1024: 4.1, 100 * 1024: 2.8}}


def late_call(comm, average, vector):
    """Return the seconds of the late rank's call; None on others."""
    comm.Barrier()
    if comm.rank == 0:
        average(vector)
    seconds = None
    for rank in range(1, comm.size):
        comm.Barrier()
        if comm.rank == rank:
            vector += 1
            begin = time.perf_counter()
            result = average(vector)
            seconds = time.perf_counter() - begin
            assert not result.timely
    comm.Barrier()
    return seconds if comm.rank == LATE else None


def measure(comm, kib, rounds):
    """Return {variant: seconds in each round} on the late rank; None on others."""
    length = kib * 256
    vectors = {"late": np.zeros(length, np.float32), "window-late": empty(comm, length)}
    copy = np.empty(length, np.float32)
    times = {name: [] for name in (*vectors, "memcpy")}
    collectives = {
        name: GroupAllreduce(
            comm, vector, group_size=comm.size, sync_period=10**9, transport="shared"
        )
        for name, vector in vectors.items()
    }
    for _ in range(WARM_UP + rounds):
        for name, vector in vectors.items():
            times[name].append(late_call(comm, collectives[name], vector))
        comm.Barrier()
        if comm.rank == LATE:
            begin = time.perf_counter()
            np.copyto(copy, vectors["late"])
            times["memcpy"].append(time.perf_counter() - begin)
        comm.Barrier()
    for collective in collectives.values():
        collective.close()
    return {name: values[WARM_UP:] for name, values in times.items()}


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=31, help="default 31")
    parsed = arguments.parse_args()
    if comm.size < 2 or parsed.rounds < 1:
        arguments.error("start it under mpiexec with two ranks or more, and for one round or more")
    rows, found = [], {}
    if comm.rank == 0:
        print("# " + ", ".join(str(value) for value in machine().values()))
    for kib in SIZES_KIB:
        times = comm.bcast(measure(comm, kib, parsed.rounds), LATE)
        size = kib * 1024
        rows.append(
            {
                "bytes": size,
                "microseconds": {name: 1e6 * median(taken) for name, taken in times.items()},
            }
        )
        for name in LATE_CALLS:
            found[ratio_label(size, name, "memcpy")] = ratio(times[name], times["memcpy"])
        if comm.rank == 0:
            print(size, {name: round(each, 1) for name, each in rows[-1]["microseconds"].items()})
    if comm.rank == 0:
        labels = [
            (ratio_label(kib * 1024, name, "memcpy"), bound)
            for kib, bound in BOUNDS.get(comm.size, {}).items()
            for name in LATE_CALLS
        ]
        figures = [figure(label, found[label], bound) for label, bound in labels]
        report(parsed, "late-call", comm.size, rows, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
