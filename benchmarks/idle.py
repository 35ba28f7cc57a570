"""The idle engine's share of a core, per rank, from 1 s after the last version.

    mpiexec -n 4 python benchmarks/idle.py

Main threads sleep. After versions at a regular cadence of 10 ms, and between versions that are
seconds apart at irregular intervals. Bound: 3 % of a core per rank.
"""

import time

import numpy as np
from common import figure, parser, quartiles, report
from mpi4py import MPI

from collectives import GroupAllreduce

BOUND = 0.03
SECONDS = 5.0
IRREGULAR = (0.5, 3.5, 1.0, 4.0, 2.0)


def share_of_core(seconds):
    """Sleep, and return the share of a core that this process has used meanwhile."""
    begin, used = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - begin)


def main():
    arguments = parser(__doc__).parse_args()
    comm = MPI.COMM_WORLD
    vector = np.zeros(1024, np.float32)
    shares = {}
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=10**9) as collective:
        for _ in range(100):
            collective(vector)
            time.sleep(0.01)
        time.sleep(1.0)
        shares["after a cadence of 10 ms"] = share_of_core(SECONDS)
        worst = 0.0
        for gap in IRREGULAR:
            collective(vector)
            time.sleep(min(1.0, gap))
            if gap > 1:
                worst = max(worst, share_of_core(gap - 1))
        shares["between irregular versions"] = worst
    everyone = comm.gather(shares)
    if comm.rank == 0:
        print(f"# {comm.size} ranks, from 1 s after a version: largest share of a core")
        results = {name: max(each[name] for each in everyone) for name in shares}
        report(
            arguments,
            "idle",
            comm.size,
            results,
            ratios={name: quartiles([value]) for name, value in results.items()},
            figures=[figure(name, value, BOUND) for name, value in results.items()],
        )


if __name__ == "__main__":
    main()
