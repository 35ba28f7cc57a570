"""Ripples' ranks with a static schedule, which fixes the groups but not their time.

In its t-th call a rank averages with its group of iteration t. The group's first member, its
leader, decides when: members tell it that they have reached iteration t, and it tells them the
members that take part once all have arrived or are out. Ranks that make no calls for a while, or
have left, are out; one that reaches that iteration later is told that the group is over, and
continues alone. So no rank waits for a rank that waits for all others.

Source: Luo et al., Heterogeneity-Aware Asynchronous Decentralized Training (Ripples), 2019, section
4.2, where all ranks take part in all their groups.
"""

import array

import cython

from collectives.protocols.formed_groups import Group, GroupProtocol

# The kinds of messages. To a leader: the iteration that a rank has reached and the number of its
# last group; or that the rank makes no calls, and whether for good; both with its number of pauses.
# From a leader: the group of an iteration, or that it is over.
COME = 0
OUT = 1
GROUP = 2
OVER = 3

# The integers of a group's message besides its members: its kind, and the record's own.
OTHERS = 1 + 3


class StaticGroupProtocol(GroupProtocol):
    """One rank of Ripples with a static schedule.

    Args:
        port, rank, size: see `GroupProtocol`.
        groups: this rank's group in each iteration of a period, sorted; () if it is in none.

    Attributes:
        alone: how many calls were in no group: there was none in the schedule, or all others were
            out, or it was over.
    """

    def __init__(self, port, rank, size, groups):
        GroupProtocol.__init__(self, port, rank, size)
        self.period = len(groups)
        # The members of all groups, and where those of each iteration begin.
        self.members = array.array("i", [member for group in groups for member in group])
        self.begins = array.array("i", [sum(map(len, groups[:i])) for i in range(len(groups) + 1)])
        self.leaders = array.array("i", sorted({group[0] for group in groups if group}))
        self.alone = 0
        self.pauses = 0
        self.waiting = False
        self.record = Group(room=size)
        self.message = array.array("q", [0]) * (OTHERS + max(map(len, groups)))
        # For leaders: the iteration in which each rank waits, −1 if it does not; its last pause,
        # and whether it has left; the last iterations whose groups have begun.
        self.came = array.array("q", [-1]) * size
        self.away = array.array("q", [0]) * size
        self.left = array.array("i", [0]) * size
        self.begun = array.array("q", [-1]) * self.period
        self.back = 0
        # A group's number is larger than those of all earlier groups of its members and leader.
        self.last = 0
        self.largest = 0

    def call(self):
        begin: cython.int = self.begins[self.phase(self.iteration())]
        GroupProtocol.call(self)
        if self.skips():
            return
        if begin == self.begins[self.phase(self.iteration()) + 1]:
            self.alone += 1
            self.port.return_model()
            return
        self.waiting = True
        self.send(self.members[begin], COME, self.iteration())

    def arrived(self, source, integers):
        kind: cython.longlong = integers[0]
        if kind == COME:
            self.came[source] = integers[1]
            # A rank that continues after a pause has met all others: they will continue as well.
            self.back = max(self.back, integers[2])
            self.largest = max(self.largest, integers[3])
            self.look_after(source)
        elif kind == OUT:
            self.away[source] = integers[2]
            self.left[source] = self.left[source] or integers[1] != 0
            self.look_after_all()
        else:
            self.waiting = False
            if kind == GROUP:
                self.record.read(integers, 1)
                self.last = self.record.number
                self.port.reduce(self.record)
            else:
                self.alone += 1
            self.port.return_model()

    def pause(self):
        i: cython.int
        self.pauses += 1
        for i in range(len(self.leaders)):
            self.send(self.leaders[i], OUT, self.leaving)

    def restart(self, calls):
        phase: cython.int
        GroupProtocol.restart(self, calls)
        # No group is in progress, and all ranks reach the same iteration next.
        for phase in range(self.period):
            self.begun[phase] = -1

    def waits_for(self, rank):
        """Return whether the call waits for a member of its group; its leader knows who arrived."""
        i: cython.int
        phase: cython.int = self.phase(self.iteration())
        if not self.waiting or rank == self.rank:
            return False
        for i in range(self.begins[phase], self.begins[phase + 1]):
            if self.members[i] == rank:
                return self.members[self.begins[phase]] != self.rank or self.is_awaited(
                    rank, self.iteration()
                )
        return False

    def iteration(self):
        """Return the number of this rank's averages before this call."""
        return self.calls // self.sync_every

    def phase(self, iteration):
        """Return an iteration's place in the period."""
        return iteration % self.period

    def send(self, rank, kind, number):
        """Send a message without a group."""
        self.message[0] = kind
        self.message[1] = number
        self.message[2] = self.pauses
        self.message[3] = self.last
        self.port.send(rank, self.message[:4])

    # The leader

    def look_after_all(self):
        """Begin all groups that need not wait any more."""
        i: cython.int
        for i in range(len(self.members)):
            self.look_after(self.members[i])

    def look_after(self, rank):
        """Begin the group for which a rank waits, if all its members have arrived or are out."""
        i: cython.int
        iteration: cython.longlong = self.came[rank]
        if iteration < 0:
            return
        phase: cython.int = self.phase(iteration)
        if self.begun[phase] >= iteration:
            self.came[rank] = -1
            self.send(rank, OVER, iteration)
            return
        for i in range(self.begins[phase], self.begins[phase + 1]):
            if self.is_awaited(self.members[i], iteration):
                return
        self.begun[phase] = iteration
        self.begin_group(phase, iteration)

    def is_awaited(self, rank, iteration):
        """Return whether a member has not reached an iteration, and is not out."""
        if self.came[rank] == iteration:
            return False
        return self.left[rank] == 0 and self.away[rank] <= self.back

    def begin_group(self, phase, iteration):
        """Form the group of the members that have arrived, and send it to them."""
        i: cython.int
        member: cython.int
        end: cython.int
        # The next number that identifies the leader, by its remainder.

        self.largest = (self.largest // self.size + 1) * self.size + self.rank
        self.record.clear(self.largest)
        for i in range(self.begins[phase], self.begins[phase + 1]):
            member = self.members[i]
            if self.came[member] == iteration:
                self.came[member] = -1
                self.record.add(member, 1)
        if self.record.size == 1:
            self.send(self.record.members[0], OVER, iteration)
            return
        self.message[0] = GROUP
        end = self.record.write(self.message, 1)
        for i in range(self.record.size):
            self.port.send(self.record.members[i], self.message[:end])
