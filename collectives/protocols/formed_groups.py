# cython: boundscheck=False, wraparound=False
"""Groups formed by any rule: the record of a group, and the port of protocols that form groups.

A protocol decides which ranks average together, in which order, and when a call returns; its driver
executes that, over MPI, in a test or in simulated time. Ranks send each other short lists of
integers, which arrive in the order in which they were sent, for each pair of ranks.
"""

import array
import math

import cython

from collectives.settings import LARGEST_WEIGHT

# A record's integers besides those of its members: number, size, and whether weights are equal.
RECORD = 3


class Group:
    """Which ranks average their vectors, and how much each one's counts.

    Args:
        number: tells it from others; 0 or more, and of a rank's later groups larger.
        members: the ranks, each once.
        weights: of the members, in their order; 0 for one that only gets the mean. None: all count
            alike.
        room: how many members it can get by `add` and `read`, where that is more.

    Attributes:
        number: as given.
        size: how many members there are.
        members, weights: arrays of which the first `size` count, by rank.
        equal: whether all weights are 1.

    Raises:
        TypeError, ValueError: it would be no such group, or no member has weight.
    """

    def __init__(self, number=0, members=(), weights=None, room=0):
        members = [checked_rank(member, number) for member in members]
        weights = checked_weights(number, members, weights)
        # None at all only where some are to come.
        if not members and room < 1:
            raise ValueError(f"group {number} has no members")
        self.room = max(len(members), room)
        self.members = array.array("i", [0]) * self.room
        # The same memory twice: weights travel as the bits that they are.
        self.bits = array.array("q", [0]) * self.room
        self.weights = memoryview(self.bits).cast("B").cast("d")
        self.clear(checked_number(number))
        for member, weight in zip(members, weights):
            self.add(member, weight)

    def clear(self, number):
        """Make it a group with this number that has no members yet."""
        self.number = number
        self.size = 0
        self.equal = True

    def add(self, member, weight):
        """Add a member that it has not, while there is room."""
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
        """Return where a rank is among the members, −1 if it is none."""
        i: cython.int
        for i in range(self.size):
            if self.members[i] == rank:
                return i
        return -1

    def write(self, integers, first):
        """Write it as integers from there on, and return where they end."""
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
        """Become what was written as integers from there on, and return where they end."""
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
    """Return the number of a group, or raise."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"a group's number is {number!r}, not an integer")
    if number < 0:
        raise ValueError(f"a group's number is {number}, less than 0")
    return number


def checked_rank(rank, number):
    """Return a member of a group, or raise."""
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError(f"group {number} has the member {rank!r}, which is not a rank")
    if rank < 0:
        raise ValueError(f"group {number} has the member {rank}, which is not a rank")
    return int(rank)


def checked_weights(number, members, weights):
    """Return the weights of a group's members, or raise."""
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
                f"not from 0 to {LARGEST_WEIGHT:g}"
            )
    if members and not math.fsum(weights) > 0:
        raise ValueError(f"no member of group {number} has a weight")
    return weights


class GroupPort:
    """What a protocol can do: its driver does it once the event that it is told of is over.

    A rank has one vector, so what its protocol wants done with that is done one after the other, in
    the order in which the protocol says it; different ranks' groups are under way at the same time.
    Two ranks that have several groups in common must be told of these in the same order.
    """

    def send(self, destination, integers):
        """Send these integers to a rank, which may be this one; they can be changed afterwards."""
        raise NotImplementedError

    def reduce(self, group):
        """Average with the other members of a group, of which this rank is one.

        In a call it gives the application's vector, which the mean overwrites. Else it gives its
        model, if the protocol is `passive`, and nothing if not. The record can be changed
        afterwards.
        """
        raise NotImplementedError

    def under_way(self, group):
        """Make this the record of the group that is averaged now; return False if there is none."""
        raise NotImplementedError

    def return_model(self):
        """Return the application's call, after what was to be reduced before."""
        raise NotImplementedError


class GroupProtocol:
    """One rank of a method in which something forms groups.

    Args:
        port, rank, size: what does it; this rank, and how many there are.

    Attributes:
        calls: how many calls of the application have returned.
        calling: whether the application is in a call, which ends with `GroupPort.return_model`.
        leaving: whether the application makes no more calls; messages are still answered.
        sync_every: calls from one average of a rank to its next; others return at once. Set
            before `begin`, to the same on all ranks.
        passive: whether this rank averages its model while its application computes. What the
            application has changed meanwhile is added to that in its next call. It takes memory for
            two vectors.
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

    # Events: a subclass adds to these

    def begin(self):
        """All ranks are there."""

    def call(self):
        """The application calls."""
        self.calling = True

    def skips(self):
        """Return whether this call is between two averages of the rank's; it returns then."""
        if self.averages():
            return False
        self.port.return_model()
        return True

    def averages(self):
        """Return whether the next call, or this one, averages if it meets anybody."""
        return (self.calls + 1) % self.sync_every == 0

    def arrived(self, source, integers):
        """A message has come."""

    def reduced(self, group):
        """A group has averaged; its record is there only during this event."""

    def overdue(self):
        """A call has waited for long: it is to end without ranks that are in no call.

        Their next one may never come.
        """

    def returned(self):
        """The application's call has returned."""
        self.calling = False
        self.calls += 1

    def pause(self):
        """The application makes no calls until `resume`; others must not wait for one.

        A call that an exception has interrupted may still be going on, and must come to its end.
        """

    def resume(self):
        """The application goes on."""

    def restart(self, calls):
        """All ranks, which have paused, go on after so many calls when they resume.

        Nobody resumes before all have heard of it.
        """
        self.calls = calls

    def leave(self):
        """The application makes no more calls."""
        self.leaving = True
        self.pause()

    # What the driver asks

    def is_quiet(self):
        """Whether this rank waits for nothing that it has begun."""
        return not self.calling

    def waits_for(self, rank):
        """Whether the application waits for a rank now, besides the members of its group."""
        return False
