"""Callers that wait for one passive rank: do they occupy the core that it needs?

    mpiexec -n 8 python benchmarks/waiting_callers.py

All ranks but the last call at the same time; the last one computes in pure Python and is served by
its progress thread, by messages; in shared memory the callers do not need it. Time of the slowest
caller.
"""

import statistics
import time

import numpy as np
from common import TRANSPORTS, parser, report
from mpi4py import MPI

from collectives import GroupAllreduce


def measure(comm, callers, versions, transport):
    """Return the seconds of each version on the slowest caller."""
    vector = np.zeros(1024, np.float32)
    times = []
    with GroupAllreduce(
        comm, vector, group_size=comm.size, sync_period=10**9, **transport
    ) as collective:
        if comm.rank == comm.size - 1:
            finished = comm.Ibarrier()
            while not finished.Test():
                for _ in range(1000):
                    pass
        else:
            for _ in range(versions):
                callers.Barrier()
                begin = time.perf_counter()
                collective(vector)
                times.append(callers.allreduce(time.perf_counter() - begin, op=MPI.MAX))
                time.sleep(0.002)
            comm.Ibarrier().Wait()
    return sorted(times)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--versions", type=int, default=300)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    callers = comm.Split(comm.rank == comm.size - 1, comm.rank)
    results = {}
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {comm.size - 1} callers wait for one passive rank, 4 KiB")
    for name, transport in TRANSPORTS.items():
        times = measure(comm, callers, arguments.versions, transport)
        if comm.rank == 0:
            results[name] = {
                "median": statistics.median(times),
                "p95": times[int(0.95 * len(times))],
            }
            shown = ", ".join(f"{key} {1e6 * value:.0f} µs" for key, value in results[name].items())
            print(f"{name}, slowest caller: {shown}")
    callers.Free()
    if comm.rank == 0:
        report(arguments, "waiting-callers", comm.size, results)


if __name__ == "__main__":
    main()
