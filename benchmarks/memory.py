"""Host memory that a collective takes beside the user's vector, per rank.

    mpiexec -n 4 python benchmarks/memory.py
    mpiexec -n 3 python benchmarks/memory.py --collective PushSum

A vector of 64 MiB of float32, all ranks in one group; calls of every kind: timely, late on each
rank in turn, started and waited for, published, synchronized, average(). Measured is the
proportional set size (PSS of /proc/self/smaps_rollup): a rank's private pages, and its part of the
pages that it shares with others, so that the sum over ranks is what they take together. That
includes MPI's allocations meanwhile. Reported is the largest value after each call and, every
20 ms, during calls; of the rank with the most. Bounds, in vectors: 3, at the ranks' own pace as
well, and 4 where the newest average over all ranks is kept; of NeighborAverage 2 and one
for each neighbor that a rank averages with, of QueuedNeighborAverage 2 and three for each (2 are
queued while it is an edge away, 1 is averaged), of PushSum 3 and one for each neighbor, of
PairwiseAverage and ParameterServer 3, of ReadyGroupAllreduce, GeneratedGroupAllreduce, FormedGroups
(groups formed by the benchmark's own protocol) and TriggeredAverage, all of whose calls average
here, 0.5.
"""

import contextlib
import functools
import threading
import time

import numpy as np
from common import TRANSPORTS, figure, parser, quartiles, report
from group_calls import Planned, form
from mpi4py import MPI

from collectives import (
    GeneratedGroupAllreduce,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PushSum,
    QueuedNeighborAverage,
    ReadyGroupAllreduce,
    TriggeredAverage,
)

BOUND = 3.0
# Bounds of collectives whose ranks send each other vectors, with the fewest possible neighbors.
PEERS = {
    NeighborAverage: 2 + 2,  # a ring's
    QueuedNeighborAverage: 2 + 2 * 3,
    PushSum: 3 + 1,
    PairwiseAverage: 3,
    ParameterServer: 3,
    ReadyGroupAllreduce: 0.5,
    GeneratedGroupAllreduce: 0.5,
}
# Bounds of collectives that are measured with both transports, in groups of all ranks.
FORMED_GROUPS = "FormedGroups", 0.5
TRIGGERED = "TriggeredAverage", 0.5
KEPT = "own pace, keeps the average"  # which takes one vector more
RULES = {
    "paper": {"late": "paper"},
    "conserving": {"late": "conserving"},
    "own pace": {"pace": "own"},
    KEPT: {"pace": "own", "keep_average": True},
}
LATENESS = 0.2  # seconds


def proportional_set_size():
    """Return this process's bytes of memory, shared pages divided by the number of sharers."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Peak:
    """The largest set size that is measured in a block."""

    def __enter__(self):
        self.value = proportional_set_size()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.ended.wait(0.02):
            self.value = max(self.value, proportional_set_size())

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.value = max(self.value, proportional_set_size())


def late(comm, average, vector):
    """Make calls for which each rank is late in turn."""
    for rank in range(comm.size):
        comm.Barrier()
        if rank == comm.rank:
            time.sleep(LATENESS)
        average(vector)


SYNCHRONOUS = {
    "synchronized": lambda comm, average, vector: average.synchronize(vector),
    "average()": lambda comm, average, vector: average.average(vector),
}
CALLS = {
    "timely": lambda comm, average, vector: average(vector),
    "late": late,
}
KINDS = {
    **CALLS,
    "started": lambda comm, average, vector: average.start(vector).wait(),
    "published": lambda comm, average, vector: average.publish(vector),
    **SYNCHRONOUS,
}
KINDS_OF_PEERS = {**CALLS, "again": CALLS["late"], **SYNCHRONOUS}


def measure(comm, vector, make, kinds):
    """Return {kind of call: bytes beside the vector, of the rank with the most}."""
    comm.Barrier()
    before = proportional_set_size()
    comm.Barrier()
    seen = {}
    with contextlib.ExitStack() as stack:
        with Peak() as peak:
            average = stack.enter_context(make())
        seen["constructed"] = peak.value - before
        for kind, call in kinds.items():
            comm.Barrier()
            with Peak() as peak:
                call(comm, average, vector)
            seen[kind] = peak.value - before
    return {kind: comm.allreduce(value, op=MPI.MAX) for kind, value in seen.items()}


def variants(comm, vector, name):
    """Return {name: function that makes the collective}, the kinds of calls, and the bound."""
    for kind, bound in PEERS.items():
        if kind.__name__ == name:
            return {name: functools.partial(kind, comm, vector)}, KINDS_OF_PEERS, bound
    makers = {
        FORMED_GROUPS: functools.partial(form, comm, vector, Planned, members=range(comm.size)),
        TRIGGERED: functools.partial(TriggeredAverage, comm, vector, sync_period=1),
    }
    for (kind, bound), make in makers.items():
        if kind == name:
            made = {
                f"{name}, {transport}": functools.partial(make, **given)
                for transport, given in TRANSPORTS.items()
            }
            return made, KINDS_OF_PEERS, bound
    groups = {"group_size": comm.size, "sync_period": 10**9}
    made = {
        f"{transport}, {rule}": functools.partial(
            GroupAllreduce, comm, vector, **settings, **groups, **given
        )
        for transport, given in TRANSPORTS.items()
        for rule, settings in RULES.items()
    }
    return made, KINDS, BOUND


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=64)
    named = [kind.__name__ for kind in (GroupAllreduce, *PEERS)] + [FORMED_GROUPS[0], TRIGGERED[0]]
    arguments.add_argument("--collective", choices=named, default=named[0])
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    vector = np.full(arguments.mib << 18, comm.rank, np.float32)
    made, kinds, bound = variants(comm, vector, arguments.collective)
    results = {name: measure(comm, vector, make, kinds) for name, make in made.items()}
    if comm.rank:
        return
    print(f"# {comm.size} ranks, memory beside a vector of {arguments.mib} MiB, in vectors")
    kinds = ["constructed", *kinds]
    print(f"{'#':46}" + "".join(f"{kind:>13}" for kind in kinds))
    found = {}
    for name, seen in results.items():
        results[name] = {kind: value / vector.nbytes for kind, value in seen.items()}
        print(f"{name:46}" + "".join(f"{results[name][kind]:13.2f}" for kind in kinds))
        found[f"{name}: memory ÷ vector"] = quartiles([max(results[name].values())])
    figures = [figure(name, value, bound + (KEPT in name)) for name, value in found.items()]
    kind = "" if arguments.collective == named[0] else f"-{arguments.collective}"
    report(arguments, f"memory{kind}", comm.size, results, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
