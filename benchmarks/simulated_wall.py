"""Simulated wall time compared with measured wall time, with stragglers that sleep.

    mpiexec -n 4 python benchmarks/simulated_wall.py

All ranks make steps in which they sleep, some of them longer, and average a vector after each:
WAGMA-SGD's collective, and MPI_Allreduce. The simulation is given the requested lengths of the
steps, and a machine whose parameters are measured before: messages between two ranks while the
others sleep, copies by all ranks at once, and the excess length of a sleep. For comparison, the
same steps are simulated with a network that takes no time.
"""

import math
import time
from statistics import median

import numpy as np
from common import figure, parser, quartiles, report
from mpi4py import MPI

from collectives import GroupAllreduce
from collectives.topology import default_group_size
from wagma.simulation import Machine, Settings, simulate, steps

BOUND = 1.15
FREE = Machine(0, 0, 0, 0, math.inf, memory=math.inf)


def stragglers(arguments, ranks):
    """Return the seconds of all steps, of shape (steps, ranks), for every kind of straggler."""
    seconds = arguments.step_ms / 1000
    even = steps.constant(arguments.steps, ranks, seconds)
    scale = 2 * seconds / 0.320
    return {
        "two random ranks +2 steps": steps.delayed(even, "cloud", 0, scale),
        "each 6× with probability 1/n": steps.delayed(even, "random", 0),
        "one rank 4× for good": steps.delayed(even, "none", 0, slow_ranks={ranks - 1: 4.0}),
    }


def measured_machine(comm, nbytes):
    """Return a `Machine` for this one, from times of two ranks' messages and all ranks' copies.

    Two cores carry all ranks' messages: like two nodes, each with half of the ranks, that can send
    as much as one rank alone.
    """
    small, long = np.zeros(1), np.zeros(nbytes // 8)
    copy = np.empty_like(long)
    half_trip = median(ping(comm, small) for _ in range(200))
    long_trip = median(ping(comm, long) for _ in range(30))
    comm.Barrier()
    copies = []
    for _ in range(30):
        begin = time.perf_counter()
        copy[:] = long
        copies.append(time.perf_counter() - begin)
    copying = comm.allreduce(median(copies), op=MPI.MAX)
    byte_gap = max(long_trip - half_trip, 1e-9) / nbytes
    overhead, byte_gap, memory = comm.bcast((half_trip / 3, byte_gap, nbytes / copying))
    return Machine(
        latency=overhead,
        overhead=overhead,
        gap=0.0,
        byte_gap=byte_gap,
        injection=1 / byte_gap,
        memory=memory,
        ranks_per_node=max(1, comm.size // 2),
    )


def ping(comm, vector):
    """Return the seconds of a vector's message from rank 0 to rank 1; the others sleep."""
    begin = time.perf_counter()
    if comm.rank == 0:
        comm.Send(vector, 1)
        comm.Recv(vector, 1)
    elif comm.rank == 1:
        comm.Recv(vector, 0)
        comm.Send(vector, 0)
    return (time.perf_counter() - begin) / 2


def oversleep(comm, arguments):
    """Return the seconds by which a rank's sleep is too long, as a mean over ranks."""
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(20):
        time.sleep(arguments.step_ms / 1000)
    late = (time.perf_counter() - begin) / 20 - arguments.step_ms / 1000
    return comm.allreduce(late) / comm.size


def wall(comm, step_times, call):
    """Return the seconds until the last rank has made all its steps."""
    comm.Barrier()
    begin = time.perf_counter()
    for seconds in step_times[:, comm.rank]:
        time.sleep(seconds)
        call()
    return comm.allreduce(time.perf_counter() - begin, op=MPI.MAX)


def measure(comm, arguments, step_times, vector):
    """Return the wall times of each method."""
    with GroupAllreduce(
        comm,
        vector,
        group_size=default_group_size(comm.size),
        sync_period=arguments.sync_period,
    ) as average:
        average.synchronize(vector)
        ours = wall(comm, step_times, lambda: average(vector))
    theirs = wall(comm, step_times, lambda: comm.Allreduce(MPI.IN_PLACE, vector))
    return {"wagma": ours, "allreduce": theirs}


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--step-ms", type=float, default=25.0)
    arguments.add_argument("--sync-period", type=int, default=10)
    arguments.add_argument("--kib", type=int, default=1024)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    vector = np.zeros(arguments.kib * 256, np.float32)
    machine = measured_machine(comm, vector.nbytes)
    late = oversleep(comm, arguments)
    settings = Settings(vector.nbytes, sync_period=arguments.sync_period)
    results, ratios, figures = {"machine": vars(machine), "oversleep_s": late}, {}, []
    if comm.rank == 0:
        print(f"# {machine}\n# sleeps are {1e3 * late:.2f} ms too long")
        print(
            f"{comm.size} ranks{'':30}{'no network s':>14}{'simulated s':>13}"
            f"{'measured s':>12}{'ratio':>8}"
        )
    for kind, step_times in stragglers(arguments, comm.size).items():
        walls = [measure(comm, arguments, step_times, vector) for _ in range(arguments.rounds)]
        if comm.rank:
            continue
        for method in ("wagma", "allreduce"):
            simulated, free = (
                simulate(method, step_times + late, each, settings).wall for each in (machine, FREE)
            )
            measured = quartiles([each[method] for each in walls])
            name = f"{method}, {kind}"
            ratio = simulated / measured["median"]
            print(
                f"{name:38}{free:13.3f}{simulated:13.3f}{measured['median']:12.3f}{ratio:8.3f}",
                flush=True,
            )
            results[name] = {
                "without_network_s": free,
                "simulated_s": simulated,
                "measured_s": measured,
            }
            ratios[f"{name}: off by"] = quartiles([max(ratio, 1 / ratio)])
            figures.append(figure(f"{name}: simulated and measured", max(ratio, 1 / ratio), BOUND))
    if comm.rank == 0:
        report(arguments, "simulated-wall", comm.size, results, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
