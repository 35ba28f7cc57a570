"""Time that ranks wait for a straggler, compared with MPI_Allreduce.

    mpiexec -n 4 python benchmarks/straggler_wait.py

The last rank sleeps 100 ms at every step, the others 10 ms; then each averages a vector of 1 MiB,
all ranks in one group. A rank waits in its call: the time is over the steps between two
synchronizations, and of the rank, other than the straggler, that waits the longest. The time of the
next synchronization is shown beside it: ranks that make as many steps as a rank that is always slow
must let it catch up there.
"""

import time
from statistics import median

import numpy as np
from common import TRANSPORTS, figure, parser, ratio, report
from mpi4py import MPI

from collectives import GroupAllreduce

BOUND = 0.10
REFERENCE = "MPI_Allreduce"


def waited(comm, call, arguments):
    """Return the seconds per step that this rank spends in calls, and if it is the straggler."""
    straggles = comm.rank == comm.size - 1
    pause = (arguments.straggler_ms if straggles else arguments.step_ms) / 1000
    comm.Barrier()
    in_calls = 0.0
    for _ in range(arguments.steps):
        time.sleep(pause)
        begin = time.perf_counter()
        call()
        in_calls += time.perf_counter() - begin
    return in_calls / arguments.steps, straggles


def slowest(comm, seconds, straggles):
    return comm.allreduce(0.0 if straggles else seconds, op=MPI.MAX)


def time_mpi(comm, vector, arguments):
    vector.fill(0)
    seconds, straggles = waited(comm, lambda: comm.Allreduce(MPI.IN_PLACE, vector), arguments)
    return slowest(comm, seconds, straggles), 0.0


def time_ours(comm, vector, arguments, transport):
    vector.fill(0)
    with GroupAllreduce(
        comm, vector, group_size=comm.size, sync_period=10**9, **transport
    ) as average:
        average.synchronize(vector)
        seconds, straggles = waited(comm, lambda: average(vector), arguments)
        begin = time.perf_counter()
        average.synchronize(vector)
        at_synchronization = time.perf_counter() - begin
        return slowest(comm, seconds, straggles), slowest(comm, at_synchronization, straggles)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=9, help="between synchronizations")
    arguments.add_argument("--straggler-ms", type=float, default=100.0)
    arguments.add_argument("--step-ms", type=float, default=10.0)
    arguments.add_argument("--kib", type=int, default=1024)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    vector = np.zeros(arguments.kib * 256, np.float32)
    times = {name: [] for name in (REFERENCE, *TRANSPORTS)}
    for _ in range(arguments.rounds):
        times[REFERENCE].append(time_mpi(comm, vector, arguments))
        for name, transport in TRANSPORTS.items():
            times[name].append(time_ours(comm, vector, arguments, transport))
    if comm.rank:
        return
    print(f"# {comm.size} ranks, the last sleeps {arguments.straggler_ms:g} ms a step")
    print(f"{'# ms, medians':16}{'wait in a step':>16}{'in the synchronization':>24}")
    waits = {name: [wait for wait, _ in values] for name, values in times.items()}
    results = {}
    for name, values in times.items():
        results[name] = {
            "wait_ms": 1e3 * median(waits[name]),
            "synchronization_ms": 1e3 * median(wait for _, wait in values),
        }
        print("{:16}{wait_ms:16.2f}{synchronization_ms:24.2f}".format(name, **results[name]))
    found = {f"{name} ÷ {REFERENCE}": ratio(waits[name], waits[REFERENCE]) for name in TRANSPORTS}
    figures = [figure(f"wait: {name}", value, BOUND) for name, value in found.items()]
    report(arguments, "straggler-wait", comm.size, results, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
