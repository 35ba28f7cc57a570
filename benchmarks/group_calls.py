"""Time of averages that a protocol or any rank starts, compared with MPI_Allreduce.

    mpiexec -n 4 python benchmarks/group_calls.py

Vectors of float32 of 1 KiB to 16 MiB; all ranks of one node call together, in one group of all of
them, or in two groups of half of them at the same time, by messages or in shared memory.
"planned": every rank knows the groups, so that no messages announce them; "formed": each rank tells
rank 0 that it is ready, and receives its group from it; both protocols are in Python here, which
takes most of a short call's time. "ready": `ReadyGroupAllreduce`, with groups of the ranks that are
ready first. "triggered": `TriggeredAverage` of all ranks; the first to call starts each average
(τ = 1). "between": its calls from one average to the next, which average nothing. The reference is
MPI_Allreduce of the same vector on a communicator made for the group before; it only sums, while
ours averages, checks that all elements are finite, and serves other messages.

The variants take turns in every round; the first round is discarded, and results are checked in
it. A time is that of the slowest rank, per call of several in a row; the table has medians over the
rounds, and a ratio is the median of the ratios round by round.
"""

import contextlib
import functools
import itertools

import numpy as np
from common import TRANSPORTS, compare_by_size, time_warm
from mpi4py import MPI

from collectives import ReadyGroupAllreduce, TriggeredAverage
from collectives.formed_groups import FormedGroupCollective
from collectives.protocols.formed_groups import Group
from collectives.protocols.scripted import ScriptedGroupProtocol

SIZES = [1 << 10 << shift for shift in range(0, 16, 2)]
BOUND = 1.0
BETWEEN = "between"


class Planned:
    """One rank of a protocol whose groups all ranks know.

    Args:
        members: of this rank's group, in every call.
    """

    passive = leaving = calling = False
    due = 1 << 62  # never

    def __init__(self, port, rank, size, members):
        self.port, self.rank, self.members = port, rank, members
        self.calls = 0

    def begin(self):
        pass

    def call(self):
        self.calling = True
        self.port.reduce(Group(self.calls, self.members))
        self.port.return_model()

    def passed(self, time):
        pass

    def fell_due(self):
        pass

    def reduced(self, group):
        pass

    def overdue(self):
        pass

    def returned(self):
        self.calling = False
        self.calls += 1

    def pause(self):
        pass

    def restart(self, calls):
        self.calls = calls

    resume = pause

    def leave(self):
        self.leaving = True

    def is_quiet(self):
        return not self.calling

    def waits_for(self, rank):
        return False


class Formed(Planned):
    """One rank of a protocol that asks rank 0, which waits until all members are ready."""

    def __init__(self, port, rank, size, members):
        super().__init__(port, rank, size, members)
        self.ready, self.formed = {}, 0

    def call(self):
        self.calling = True
        self.port.send(0, [self.rank, *self.members])

    def arrived(self, source, integers):
        first, *members = integers
        if first < 0:
            self.port.reduce(Group(-1 - first, members))
            self.port.return_model()
            return
        ready = self.ready.setdefault(tuple(members), set())
        ready.add(first)
        if len(ready) == len(members):
            self.formed += 1
            ready.clear()
            for member in members:
                self.port.send(member, [-self.formed, *members])


def form(comm, vector, protocol, transport=None, **settings):
    """Return a collective of one of these protocols."""
    make = functools.partial(protocol, **settings)

    def plan():
        return {}, lambda port, rank, size: ScriptedGroupProtocol(port, rank, size, make)

    return FormedGroupCollective(comm, vector, plan, transport=transport)


@contextlib.contextmanager
def opened(make, comm, vector, **settings):
    with make(comm, vector, **settings) as collective:
        yield lambda: collective(vector)


@contextlib.contextmanager
def allreduce(comm, vector, members):
    group = comm.Split(members[0])
    result = np.empty_like(vector)
    yield lambda: group.Allreduce(vector, result)
    group.Free()


def variants(comm):
    """Return {name: (function that opens it, the reference's name or None)}."""
    half = comm.size // 2
    mine = range(half) if comm.rank < half else range(half, comm.size)
    made = {}
    groups = {"all": range(comm.size)} | ({"halves": mine} if half > 1 else {})
    for where, members in groups.items():
        reference = f"Allreduce, {where}"
        made[reference] = functools.partial(allreduce, members=members), None
        # In smaller groups a rank may be left over, while the others wait for it in a barrier.
        for transport in TRANSPORTS if where == "all" else ():
            for name, (make, settings) in {
                "ready": (ReadyGroupAllreduce, {"group_size": len(members)}),
                "triggered": (TriggeredAverage, {"sync_period": 1}),
                BETWEEN: (TriggeredAverage, {"sync_period": 1 << 40}),
            }.items():
                call = functools.partial(opened, make, transport=transport, **settings)
                made[f"{name}, {transport}, {where}"] = call, reference
        for kind, transport in itertools.product((Planned, Formed), TRANSPORTS):
            name = f"{kind.__name__.lower()}, {transport}, {where}"
            settings = {"members": members, "protocol": kind, "transport": transport}
            made[name] = functools.partial(opened, form, **settings), reference
    return made


def check(comm, name, vector):
    """Raise if a group's mean is wrong."""
    half = comm.size // 2
    halves = np.arange(half) if comm.rank < half else np.arange(half, comm.size)
    expected = np.arange(comm.size) if name.endswith("all") else halves
    if not comm.allreduce(np.allclose(vector, expected.mean(), rtol=1e-5), op=MPI.LAND):
        raise ArithmeticError(f"wrong result of {name} for {vector.nbytes} bytes: {vector[:3]}")


def main():
    comm = MPI.COMM_WORLD
    made = variants(comm)

    def timed(name, vector, calls, first):
        open_variant, reference = made[name]
        vector[:] = comm.rank
        with open_variant(comm, vector) as call:
            seconds = time_warm(comm, call, calls)
        if reference and first and not name.startswith(BETWEEN):
            check(comm, name, vector)
        return seconds

    references = {name: reference for name, (_, reference) in made.items()}
    compare_by_size(comm, __doc__, "group-calls", SIZES, references, timed, BOUND)


if __name__ == "__main__":
    main()
