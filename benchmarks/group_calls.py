"""Time of calls in groups that a protocol forms, beside MPI_Allreduce of the same ranks.

    mpiexec -n 4 python benchmarks/group_calls.py

Vectors of float32 of 1 KiB to 16 MiB; all ranks of one node call together, in one group of all of
them, or in two of half of them each at the same time. "planned": every rank knows the groups, so no
message says them; "formed": each rank tells rank 0 that it is ready, and is told its group by it.
The reference is MPI_Allreduce of the same vector on a communicator made for the group before; it
sums, where ours averages, checks that all is finite, and serves whatever else comes. Both protocols
are in Python here, which takes most of a short call's time; compiled ones take a fraction of that.

The variants take turns in every round; the first round is thrown away, and results are checked in
it. A time is that of the slowest rank, per call of several in a row; the table has medians over the
rounds, and a ratio is the median of the ratios round by round.
"""

import contextlib
import functools
import time
from statistics import median

import numpy as np
from common import figure, machine, parser, ratio, ratio_label, report, time_calls
from mpi4py import MPI

from collectives.formed_groups import FormedGroupCollective
from collectives.protocols.formed_groups import Group
from collectives.protocols.scripted import ScriptedGroupProtocol

SIZES = [1 << 10 << shift for shift in range(0, 16, 2)]
WARM_UP = 3
MAX_CALLS = 300
BOUND = 1.0


class Planned:
    """One rank of a protocol whose groups everybody knows.

    Args:
        members: of this rank's group, in every call.
    """

    passive = leaving = calling = False

    def __init__(self, port, rank, size, members):
        self.port, self.rank, self.members = port, rank, members
        self.calls = 0

    def begin(self):
        pass

    def call(self):
        self.calling = True
        self.port.reduce(Group(self.calls, self.members))
        self.port.return_model()

    def reduced(self, group):
        pass

    def returned(self):
        self.calling = False
        self.calls += 1

    def pause(self):
        pass

    resume = pause

    def leave(self):
        self.leaving = True

    def is_quiet(self):
        return not self.calling

    def waits_for(self, rank):
        return False


class Formed(Planned):
    """One that asks rank 0, which waits until all members of a group are ready."""

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


def form(comm, vector, protocol, **settings):
    """Return a collective of one of these protocols."""
    make = functools.partial(protocol, **settings)

    def plan():
        return {}, lambda port, rank, size: ScriptedGroupProtocol(port, rank, size, make)

    return FormedGroupCollective(comm, vector, plan)


@contextlib.contextmanager
def opened(comm, vector, **settings):
    with form(comm, vector, **settings) as collective:
        yield lambda: collective(vector)


@contextlib.contextmanager
def allreduce(comm, vector, members):
    group = comm.Split(members[0])
    result = np.empty_like(vector)
    yield lambda: group.Allreduce(vector, result)
    group.Free()


def variants(comm):
    """Return {name: (what opens it, the reference's name or None)}."""
    half = comm.size // 2
    mine = range(half) if comm.rank < half else range(half, comm.size)
    made = {}
    for where, members in {"all": range(comm.size), "halves": mine}.items():
        reference = f"Allreduce, {where}"
        made[reference] = functools.partial(allreduce, members=members), None
        for kind in (Planned, Formed):
            name = f"{kind.__name__.lower()}, {where}"
            made[name] = functools.partial(opened, members=members, protocol=kind), reference
    return made


def time_variant(comm, open_variant, vector, calls):
    """Seconds per call that all ranks begin together."""
    vector[:] = comm.rank
    with open_variant(comm, vector) as call:
        time_calls(comm, call, WARM_UP + calls // 10)
        return time_calls(comm, call, calls)


def check(comm, name, vector):
    """Raise where a group's mean is not what it must be."""
    half = comm.size // 2
    halves = np.arange(half) if comm.rank < half else np.arange(half, comm.size)
    expected = np.arange(comm.size) if name.endswith("all") else halves
    if not comm.allreduce(np.allclose(vector, expected.mean(), rtol=1e-5), op=MPI.LAND):
        raise ArithmeticError(f"wrong result of {name} for {vector.nbytes} bytes: {vector[:3]}")


def measure(comm, size, rounds, seconds):
    """Return {variant: seconds per call in each round}; the variants take turns."""
    vector = np.empty(size // 4, np.float32)
    made = variants(comm)
    times = {name: [] for name in made}
    share = seconds / (rounds + 1) / len(times)
    end = time.monotonic() + seconds
    for done in range(rounds + 1):
        if comm.bcast(done > 3 and time.monotonic() > end):
            break
        for name, (open_variant, reference) in made.items():
            taken = times[name]
            calls = max(1, min(MAX_CALLS, int(share / min(taken)))) if taken else WARM_UP
            taken.append(time_variant(comm, open_variant, vector, comm.bcast(calls)))
            if reference and done == 0:
                check(comm, name, vector)
    return {name: taken[1:] for name, taken in times.items()}


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--max-kib", type=int, default=SIZES[-1] >> 10)
    arguments.add_argument("--rounds", type=int, default=11, help="at most (default 11)")
    arguments.add_argument("--seconds", type=float, default=10.0, help="for a size (default 10)")
    arguments = arguments.parse_args()
    made, rows, found = variants(comm), [], {}
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {', '.join(str(value) for value in machine().values())}")
        print("# µs per call of the slowest rank, median of the rounds")
        print(f"{'# Size (B)':<12}" + "".join(f"{name:>18}" for name in made), flush=True)
    for size in [size for size in SIZES if size >> 10 <= arguments.max_kib]:
        times = measure(comm, size, arguments.rounds, arguments.seconds)
        if comm.rank:
            continue
        medians = {name: 1e6 * median(taken) for name, taken in times.items()}
        print(f"{size:<12}" + "".join(f"{medians[name]:18.2f}" for name in made), flush=True)
        rows.append({"bytes": size, "microseconds": medians})
        for name, (_, reference) in made.items():
            if reference:
                found[ratio_label(size, name, reference)] = ratio(times[name], times[reference])
    if comm.rank == 0:
        figures = [figure(label, value, BOUND) for label, value in found.items()]
        report(arguments, "group-calls", comm.size, rows, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
