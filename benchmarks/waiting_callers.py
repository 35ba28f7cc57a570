"""Callers that wait for one passive rank: do they take the core that it needs?

    mpiexec -n 8 python benchmarks/waiting_callers.py

All ranks but the last call at the same time; the last one computes in pure Python and is served by
its progress thread. Time of the slowest caller.
"""

import statistics
import time

import numpy as np
from common import parser, report
from mpi4py import MPI

from collectives import GroupAllreduce


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--versions", type=int, default=300)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    last = comm.size - 1
    callers = comm.Split(comm.rank == last, comm.rank)
    vector = np.zeros(1024, np.float32)
    times = []
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=10**9) as collective:
        finished = comm.Ibarrier() if comm.rank == last else None
        if comm.rank == last:
            while not finished.Test():
                for _ in range(1000):
                    pass
        else:
            for _ in range(arguments.versions):
                callers.Barrier()
                begin = time.perf_counter()
                collective(vector)
                times.append(callers.allreduce(time.perf_counter() - begin, op=MPI.MAX))
                time.sleep(0.002)
            comm.Ibarrier().Wait()
    callers.Free()
    if comm.rank == 0:
        times.sort()
        figures = {"median": statistics.median(times), "p95": times[int(0.95 * len(times))]}
        print(f"# {comm.size} ranks, {comm.size - 1} callers wait for one passive rank, 4 KiB")
        print("slowest caller: " + ", ".join(f"{k} {1e6 * v:.0f} µs" for k, v in figures.items()))
        report(arguments, "waiting-callers", comm.size, figures)


if __name__ == "__main__":
    main()
