"""Ripples' ranks, whose groups a group generator on one rank forms on request.

A call sends a request to the generator, and executes the groups with its rank that the generator
has formed, in their order: all of them up to that of its own request (random), or the oldest one
(buffered, smart). If the rank knows that one already, it waits for no answer. The remaining groups
are left to the next call. A group of one rank is a call without an average.

A rank that pauses tells the controller. Until the controller has answered, it takes part at once,
outside a call and without weight, in the groups that it was put into.

A rank whose next call takes much longer than usual (`Paces.patience`) is late: it may wait
elsewhere for ranks that wait for it. It then does as if it paused, and is put into no group until
its next request. So does a rank that has not made a call yet, if a member of its group has waited
that long by the member's own pace, and any rank outside a call if a member has waited too long.
"""

import array

import cython

from collectives.protocols.formed_groups import Group, GroupProtocol
from collectives.protocols.paces import Paces

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.paces import NEVER, UNKNOWN

# The kinds of messages. To the controller: a request, with the rank's number of pauses; a pause,
# with that and until when it lasts. From the controller: a group; that there is none; the answer to
# a pause, after which no more groups follow. To members of a group: that a member waits for them,
# and whether for too long.
REQUEST = 0
PAUSE = 1
GROUP = 2
NOBODY = 3
PAUSED = 4
AWAITED = 5

# When a pause ends: once the rank has met all others, with its next request, or never.
MEETING = 0
REQUESTING = 1
EVER = 2

# A group's message has, besides its members: its kind; the rank whose request it answers, or ANY
# if it answers each member's; and the record's own integers.
HEADER = 2
ANY = -1
OTHERS = HEADER + 3

# Larger than any group's number.
LAST = 2**62


class GeneratedGroupProtocol(GroupProtocol):
    """One rank of Ripples with a group generator.

    Args:
        port, rank, size: see `GroupProtocol`.
        generator: a `GroupGenerator`, with the same arguments on all ranks.
        controller: the rank whose generator forms the groups.

    Attributes:
        alone: how many calls averaged with no other rank, because there was none for a group.
    """

    def __init__(self, port, rank, size, generator, controller):
        GroupProtocol.__init__(self, port, rank, size)
        self.generator = generator
        self.controller = controller
        self.alone = 0
        self.pauses = 0
        # Whether the application waits for its group to be formed; pauses not answered yet.
        self.waiting = False
        self.unanswered = 0
        # Whether a call sends its request only once these are answered.
        self.deferred = False
        # Whether the application pauses; the time, when the last call returned, and the usual time
        # from there to the next call.
        self.pausing = False
        self.now = 0
        self.since = 0
        self.paces = Paces(1)
        self.record = Group(room=generator.most)
        self.message = array.array("q", [0]) * (OTHERS + generator.most)
        # The groups that this rank has not begun yet, as a ring of messages.
        self.stride = len(self.message)
        self.room = generator.room
        self.kept = array.array("q", [0]) * (self.room * self.stride)
        self.first = 0
        self.count = 0

    def begin(self):
        self.since = self.now

    def passed(self, time):
        self.now = time

    def fell_due(self):
        self.due = NEVER
        if self.calling:
            self.remind(LAST, False)
            self.wait_on()
        else:
            self.let_go(REQUESTING)

    def wait_on(self):
        """Set `due` to the end of this rank's patience."""
        if self.size > 1:
            self.due = self.now + self.paces.patience(0, 0)

    def call(self):
        GroupProtocol.call(self)
        self.paces.add(0, self.now - self.since)
        self.wait_on()
        if self.skips():
            return
        self.deferred = self.unanswered > 0
        if not self.deferred:
            self.request()

    def returned(self):
        GroupProtocol.returned(self)
        self.go_on()

    def go_on(self):
        """Note that the application computes from now on, unless it pauses."""
        self.due = NEVER
        self.since = self.now
        if not (self.pausing or self.leaving or self.paces.usual(0) == UNKNOWN):
            self.wait_on()

    def request(self):
        """Request a group."""
        self.waiting = True
        self.send(self.controller, REQUEST, 0)
        self.proceed()

    def arrived(self, source, integers):
        kind: cython.longlong = integers[0]
        if kind == REQUEST:
            self.answer(source, self.generator.request(source, integers[1]))
        elif kind == PAUSE:
            if integers[2] == REQUESTING:
                self.generator.lag(source)
            else:
                self.generator.pause(source, integers[1], integers[2] == EVER)
            self.send(source, PAUSED, 0)
        elif kind == GROUP:
            self.keep(integers)
            self.proceed()
        elif kind == NOBODY:
            self.end_alone()
        elif kind == AWAITED:
            # A rank in a call reaches that group, or waits too long itself.
            too_long: cython.bint = integers[2] != 0
            may: cython.bint = too_long or self.paces.usual(0) == UNKNOWN
            if may and not self.calling and not self.leaving:
                self.let_go(MEETING if self.pausing else REQUESTING)
                self.remind(integers[1], too_long)
        else:
            self.unanswered -= 1
            if self.deferred and self.unanswered == 0:
                self.deferred = False
                self.request()

    def restart(self, calls):
        GroupProtocol.restart(self, calls)
        self.generator.restart()

    def pause(self):
        self.pauses += 1
        self.pausing = True
        if not self.calling:
            self.due = NEVER
        if self.deferred:
            self.deferred = False
            self.end_alone()
        self.let_go(EVER if self.leaving else MEETING)

    def resume(self):
        self.pausing = False
        self.go_on()

    def let_go(self, until):
        """Take part at once in the groups that this rank was put into, and then in none.

        `until`: MEETING, REQUESTING or EVER.
        """
        self.unanswered += 1
        self.send(self.controller, PAUSE, until)
        self.proceed()

    def overdue(self):
        self.remind(LAST, True)

    def remind(self, number, too_long):
        """Tell the members of the group being averaged that this rank waits, and if for too long.

        Only if the group's number is below `number`. A member may itself wait in an earlier group.
        """
        i: cython.int
        if not self.port.under_way(self.record) or self.record.number >= number:
            return
        self.message[0] = AWAITED
        self.message[1] = self.record.number
        self.message[2] = too_long
        for i in range(self.record.size):
            if self.record.members[i] != self.rank:
                self.port.send(self.record.members[i], self.message[:3])

    def is_quiet(self):
        return GroupProtocol.is_quiet(self) and self.unanswered == 0

    def waits_for(self, rank):
        """Return whether `rank` is the controller, and this rank waits for its answer."""
        if rank == self.rank or rank != self.controller:
            return False
        return self.waiting or self.unanswered > 0

    # The groups of this rank

    def keep(self, integers):
        """Keep a group until it is executed."""
        i: cython.int
        begin: cython.int = (self.first + self.count) % self.room * self.stride
        for i in range(len(integers)):
            self.kept[begin + i] = integers[i]
        self.count += 1

    def proceed(self):
        """Execute groups while a call waits for its own, or a pause is unanswered."""
        begin: cython.int
        asked: cython.longlong
        answers: cython.bint
        while self.count > 0 and (self.waiting or self.unanswered > 0):
            begin = self.first * self.stride
            asked = self.kept[begin + 1]
            self.record.read(self.kept, begin + HEADER)
            self.first = (self.first + 1) % self.room
            self.count -= 1
            answers = self.waiting and (asked == ANY or asked == self.rank)
            if self.record.size > 1:
                self.port.reduce(self.record)
            elif answers:
                self.alone += 1
            if answers:
                self.end_call()

    def end_call(self):
        """Return from the call, once the groups requested so far have been averaged."""
        self.waiting = False
        self.port.return_model()

    def end_alone(self):
        """Return from the call without a group."""
        self.alone += 1
        self.end_call()

    def send(self, rank, kind, detail):
        """Send a message without a group."""
        self.message[0] = kind
        self.message[1] = self.pauses
        self.message[2] = detail
        self.port.send(rank, self.message[:3])

    # The controller

    def answer(self, source, formed):
        """Send the groups that a request formed to their members, or NOBODY to the requester."""
        index: cython.int
        i: cython.int
        end: cython.int
        if formed < 0:
            self.send(source, NOBODY, 0)
        for index in range(formed):
            self.generator.write(index, self.record)
            self.message[0] = GROUP
            self.message[1] = ANY if self.generator.reuses else source
            end = self.record.write(self.message, HEADER)
            for i in range(self.record.size):
                self.port.send(self.record.members[i], self.message[:end])
