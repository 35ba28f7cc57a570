"""Groups formed by any rule: the record of a group, and the port of protocols that form groups.

A protocol decides which ranks average together, in which order, and when a call returns; its driver
executes this over MPI, in a test or in simulated time. Ranks send each other short lists of
integers; those of one sender arrive in the order in which they were sent.
"""

import array
import math

import cython

from collectives.protocols.rank_port import StepPort
from collectives.settings import LARGEST_WEIGHT

if not cython.compiled:  # else the .pxd declares it
    from collectives.protocols.paces import NEVER

# Number of integers in a record before its members: number, size, and whether weights are equal.
RECORD = 3


class Group:
    """Which ranks average their vectors, and the weight of each.

    Args:
        number: identifies the group; 0 or more, and increasing over a rank's groups.
        members: the ranks, each once.
        weights: the members', in their order; 0 for one that only gets the mean. None: all are
            equal.
        room: how many members `add` and `read` may give the group, if more than `members` has.

    Attributes:
        number: as given.
        size: number of members.
        members, weights: arrays whose first `size` elements are used, ordered by rank.
        equal: whether all weights are 1.

    Raises:
        TypeError, ValueError: an argument is invalid, or no member has weight.
    """

    def __init__(self, number=0, members=(), weights=None, room=0):
        members = [checked_rank(member, number) for member in members]
        weights = checked_weights(number, members, weights)
        # A group may be empty only if members can be added later.
        if not members and room < 1:
            raise ValueError(f"group {number} has no members")
        self.room = max(len(members), room)
        self.members = array.array("i", [0]) * self.room
        # Two views of the same memory: weights are sent as the bits of their doubles.
        self.bits = array.array("q", [0]) * self.room
        self.weights = memoryview(self.bits).cast("B").cast("d")
        self.clear(checked_number(number))
        for member, weight in zip(members, weights):
            self.add(member, weight)

    def clear(self, number):
        """Make this an empty group with this number."""
        self.number = number
        self.size = 0
        self.equal = True

    def add(self, member, weight):
        """Add a new member, while there is room."""
        i: cython.int = self.size
        while i > 0 and self.members[i - 1] > member:
            self.members[i] = self.members[i - 1]
            self.weights[i] = self.weights[i - 1]
            i -= 1
        self.members[i] = member
        self.weights[i] = weight
        self.size += 1
        self.equal = self.equal and weight == 1

    def index_of(self, rank):
        """Return the index of a rank among the members, −1 if it is not a member."""
        i: cython.int
        for i in range(self.size):
            if self.members[i] == rank:
                return i
        return -1

    def write(self, integers, first):
        """Write the group as integers, from index `first`; return the index after the last."""
        i: cython.int
        integers[first] = self.number
        integers[first + 1] = self.size
        integers[first + 2] = self.equal
        first += RECORD
        for i in range(self.size):
            integers[first + i] = self.members[i]
        first += self.size
        if not self.equal:
            for i in range(self.size):
                integers[first + i] = self.bits[i]
            first += self.size
        return first

    def read(self, integers, first):
        """Read a group from integers, from index `first`; return the index after the last."""
        i: cython.int
        self.number = integers[first]
        self.size = integers[first + 1]
        self.equal = integers[first + 2] != 0
        first += RECORD
        for i in range(self.size):
            self.members[i] = integers[first + i]
        first += self.size
        for i in range(self.size):
            if self.equal:
                self.weights[i] = 1
            else:
                self.bits[i] = integers[first + i]
        return first if self.equal else first + self.size

    def listed(self):
        """Return the members and their weights as two tuples."""
        return tuple(self.members[: self.size]), tuple(self.weights[: self.size])

    def __reduce__(self):
        return Group, (self.number, *self.listed(), self.room)

    def __repr__(self):
        members, weights = self.listed()
        if self.equal:
            return f"Group({self.number}, {members})"
        return f"Group({self.number}, {members}, {weights})"


def checked_number(number):
    """Return the number of a group; raise if it is invalid."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"a group's number is {number!r}, not an integer")
    if number < 0:
        raise ValueError(f"a group's number is {number}, less than 0")
    return number


def checked_rank(rank, number):
    """Return a member of a group as an int; raise if it is no rank."""
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError(f"group {number} has the member {rank!r}, which is not a rank")
    if rank < 0:
        raise ValueError(f"group {number} has the member {rank}, which is not a rank")
    return int(rank)


def checked_weights(number, members, weights):
    """Return the weights of a group's members as a list; raise if they are invalid."""
    if len(set(members)) < len(members):
        twice = next(member for member in members if members.count(member) > 1)
        raise ValueError(f"group {number} has rank {twice} twice")
    if weights is None:
        return [1.0] * len(members)
    weights = [float(weight) for weight in weights]
    if len(weights) != len(members):
        raise ValueError(f"group {number} has {len(members)} members, but {len(weights)} weights")
    for member, weight in zip(members, weights):
        if not 0 <= weight <= LARGEST_WEIGHT:
            raise ValueError(
                f"the weight of rank {member} in group {number} is {weight:g}, "
                f"not between 0 and {LARGEST_WEIGHT:g}"
            )
    if members and not math.fsum(weights) > 0:
        raise ValueError(f"no member of group {number} has a weight")
    return weights


class GroupPort(StepPort):
    """The actions of a protocol: its driver executes them after the event that it reports.

    A rank has one vector, so actions on it are executed one after the other, in the order in which
    the protocol requests them; groups of different ranks are averaged at the same time.
    Two ranks that have several groups in common must receive these in the same order.
    """

    def send(self, destination, integers):
        """Send these integers to a rank, possibly this one; they may be changed afterwards."""
        raise NotImplementedError

    def reduce(self, group):
        """Average with the other members of a group that includes this rank.

        In a call the rank contributes the application's vector, which the mean overwrites. Outside
        calls it contributes its model if the protocol is `passive`, else nothing. What is not
        finite is not contributed. The record may be changed afterwards.
        """
        raise NotImplementedError

    def under_way(self, group):
        """Copy the record of the group being averaged now into `group`; return False if none is."""
        raise NotImplementedError

    def return_model(self):
        """Return from the application's call, after the averages requested before."""
        raise NotImplementedError


class GroupProtocol:
    """One rank of a method in which some rule forms groups.

    Args:
        port, rank, size: the `GroupPort` that executes actions; this rank; the number of ranks.

    Attributes:
        calls: how many calls of the application have returned.
        calling: whether the application is in a call, which ends with `GroupPort.return_model`.
        leaving: whether the application makes no more calls; messages are still answered.
        sync_every: number of a rank's calls from one average to the next; the calls between return
            at once. Set before `begin`, the same on all ranks.
        passive: whether this rank averages its model while its application computes. The change
            that the application makes meanwhile is added to the model in the next call. This takes
            memory for two vectors.
        due: the time from which `fell_due` is to be called.
    """

    def __init__(self, port, rank, size):
        self.port = port
        self.rank = rank
        self.size = size
        self.calls = 0
        self.calling = False
        self.leaving = False
        self.passive = False
        self.sync_every = 1
        self.due = NEVER

    # Events, which subclasses extend

    def begin(self):
        """Begin, when all ranks are ready."""

    def passed(self, time):
        """Note the time of the events that follow, in nanoseconds; it never goes back."""

    def fell_due(self):
        """Act, because the time has come to `due`.

        By then messages that had arrived have been handled: where the process was held up, ranks
        that are waited for may have sent theirs.
        """

    def call(self):
        """Begin a call of the application."""
        self.calling = True

    def skips(self):
        """Return whether this call is between two averages of this rank; if so, end the call."""
        if self.averages():
            return False
        self.port.return_model()
        return True

    def averages(self):
        """Return whether the next or current call averages, if other ranks take part."""
        return (self.calls + 1) % self.sync_every == 0

    def arrived(self, source, integers):
        """Handle a message that has arrived."""

    def reduced(self, group):
        """Handle the end of a group's average; its record is valid only during this event."""

    def overdue(self):
        """End a call that has waited for long, without the ranks that are in no call.

        Their next call may never come.
        """

    def returned(self):
        """Note that the application's call has returned."""
        self.calling = False
        self.calls += 1

    def pause(self):
        """Note that the application makes no calls until `resume`; others must not wait for one.

        A call that an exception has interrupted may still be in progress, and must complete.
        """

    def resume(self):
        """Note that the application makes calls again."""

    def restart(self, calls):
        """Set this rank's number of calls, as all ranks do while they pause.

        No rank resumes before all have done so.
        """
        self.calls = calls

    def leave(self):
        """Note that the application makes no more calls."""
        self.leaving = True
        self.pause()

    # The driver's queries

    def is_quiet(self):
        """Return whether this rank waits for nothing that it has begun."""
        return not self.calling

    def waits_for(self, rank):
        """Return whether the application waits for a rank now, besides its group's members."""
        return False
