"""Without skew: GroupAllreduce(wait="group") beside MPI_Allreduce on the same ranks.

    mpiexec -n 4 python benchmarks/allreduce.py

Vectors of 1 to 256 KiB of float32, all ranks in one group, time of the slowest rank, medians over
interleaved rounds. The publish copy is counted in. Bound: ≤ 1.0 × MPI_Allreduce.
"""

import argparse
import statistics

import numpy as np
from common import median_ratio, report, time_calls, verdict
from mpi4py import MPI

from collectives import GroupAllreduce

BOUND = 1.0


RULES = ("paper", "conserving")


def time_ours(comm, vector, late, repetitions):
    """Time calls of a collective that is the only one open, as in most programs."""
    with GroupAllreduce(
        comm, vector, group_size=comm.size, sync_period=10**9, wait="group", late=late
    ) as average:
        time_calls(comm, lambda: average(vector), 10)
        return time_calls(comm, lambda: average(vector), repetitions)


def time_mpi(comm, vector, repetitions):
    time_calls(comm, lambda: comm.Allreduce(MPI.IN_PLACE, vector), 10)
    return time_calls(comm, lambda: comm.Allreduce(MPI.IN_PLACE, vector), repetitions)


def measure(comm, kib, rounds):
    """Return {variant: seconds per call in each round}; the variants take turns."""
    vector = np.ones(kib * 256, np.float32)
    repetitions = max(20, 3000 // (kib + 10))
    times = {"mpi": [], **{late: [] for late in RULES}}
    for _ in range(rounds):
        vector[:] = 1
        times["mpi"].append(time_mpi(comm, vector, repetitions))
        for late in RULES:
            vector[:] = 1
            times[late].append(time_ours(comm, vector, late, repetitions))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    rows = []
    if comm.rank == 0:
        print(f"# {comm.size} ranks, slowest rank, median of {arguments.rounds} rounds")
        print(f"{'KiB':>6} {'MPI_Allreduce':>14} {'paper':>10} {'conserving':>11}  ratios to MPI")
    for kib in arguments.kib:
        times = measure(comm, kib, arguments.rounds)
        ratios = {late: median_ratio(times[late], times["mpi"]) for late in RULES}
        medians = {name: 1e6 * statistics.median(values) for name, values in times.items()}
        rows.append({"kib": kib, "microseconds": medians, "ratio": ratios, "bound": BOUND})
        if comm.rank == 0:
            print(
                f"{kib:6d} {medians['mpi']:11.1f} µs {medians['paper']:7.1f} µs "
                f"{medians['conserving']:8.1f} µs  paper {ratios['paper']:.2f} "
                f"{verdict(ratios['paper'], BOUND)}, conserving {ratios['conserving']:.2f} "
                f"{verdict(ratios['conserving'], BOUND)}",
                flush=True,
            )
    if comm.rank == 0:
        report(f"allreduce-{comm.size}", rows)


if __name__ == "__main__":
    main()
