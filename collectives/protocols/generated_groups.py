# cython: boundscheck=False, wraparound=False
"""Ripples' ranks, whose groups are formed by a group generator on one rank, on request.

A call sends a request to the generator, and executes the groups with its rank that the generator
has formed, in their order: all of them up to that of its own request (random), or the oldest one
(smart), which it may have learned of before, so that it need not wait for an answer. The remaining
ones wait for the next call.

A rank that pauses tells the controller, and until that has answered it takes part at once, outside
a call and without weight, in the groups that it was put into. It does the same if another member
has waited too long for its next call, which may never come.
"""

import array

import cython

from collectives.protocols.formed_groups import Group, GroupProtocol

# The kinds of messages: to the rank that controls a request, with how often the rank has paused,
# and a pause, with that and whether it is for good; from there a group, that there is none, and
# that nothing more comes for a rank that has paused; to members of a group, that one waits in it.
REQUEST = 0
PAUSE = 1
GROUP = 2
NOBODY = 3
PAUSED = 4
AWAITED = 5

# A group's message has, besides its members: its kind, the rank whose request it answers, or ANY
# for that of each member, and the record's own integers.
HEADER = 2
ANY = -1
OTHERS = HEADER + 3

# No group has this number.
LAST = 2**62


class GeneratedGroupProtocol(GroupProtocol):
    """One rank of it.

    Args:
        port, rank, size: see `GroupProtocol`.
        generator: the `GroupGenerator`, or one like that of the controller, which is used.
        controller: the rank that controls.

    Attributes:
        alone: how many calls were in no group, because there was no other rank for one.
    """

    def __init__(self, port, rank, size, generator, controller):
        GroupProtocol.__init__(self, port, rank, size)
        self.generator = generator
        self.controller = controller
        self.alone = 0
        self.pauses = 0
        # Whether the application waits for its group to be formed; answers to pauses to come.
        self.waiting = False
        self.unanswered = 0
        # Whether a call asks only once these have come.
        self.deferred = False
        self.record = Group(room=generator.most)
        self.message = array.array("q", [0]) * (OTHERS + generator.most)
        # The groups that this rank has not yet begun, as their messages: a ring.
        self.stride = len(self.message)
        self.room = generator.room
        self.kept = array.array("q", [0]) * (self.room * self.stride)
        self.first = 0
        self.count = 0

    def call(self):
        GroupProtocol.call(self)
        if self.skips():
            return
        self.deferred = self.unanswered > 0
        if not self.deferred:
            self.request()

    def request(self):
        """Ask for a group."""
        self.waiting = True
        self.send(self.controller, REQUEST, False)
        self.proceed()

    def arrived(self, source, integers):
        kind: cython.longlong = integers[0]
        if kind == REQUEST:
            self.answer(source, self.generator.request(source, integers[1]))
        elif kind == PAUSE:
            self.generator.pause(source, integers[1], integers[2] != 0)
            self.send(source, PAUSED, False)
        elif kind == GROUP:
            self.keep(integers)
            self.proceed()
        elif kind == NOBODY:
            self.end_alone()
        elif kind == AWAITED:
            # In a call it will come to that group, or wait too long itself.
            if not self.calling and not self.leaving:
                self.let_go(False)
                self.remind(integers[1])
        else:
            self.unanswered -= 1
            if self.deferred and self.unanswered == 0:
                self.deferred = False
                self.request()

    def pause(self):
        self.pauses += 1
        if self.deferred:
            self.deferred = False
            self.end_alone()
        self.let_go(self.leaving)

    def let_go(self, leaving):
        """Take part at once in the groups that this rank was put into."""
        self.unanswered += 1
        self.send(self.controller, PAUSE, leaving)
        self.proceed()

    def overdue(self):
        self.remind(LAST)

    def remind(self, number):
        """Tell the members of the group that is averaged now, if it is before this one.

        A member may itself be in one that comes before that, and wait for somebody there.
        """
        i: cython.int
        if not self.port.under_way(self.record) or self.record.number >= number:
            return
        self.message[0] = AWAITED
        self.message[1] = self.record.number
        for i in range(self.record.size):
            if self.record.members[i] != self.rank:
                self.port.send(self.record.members[i], self.message[:2])

    def is_quiet(self):
        return GroupProtocol.is_quiet(self) and self.unanswered == 0

    def waits_for(self, rank):
        """What a call waits for before its group is known is the controller's answer."""
        if rank == self.rank or rank != self.controller:
            return False
        return self.waiting or self.unanswered > 0

    # The groups of this rank

    def keep(self, integers):
        """Keep a group until it is carried out."""
        i: cython.int
        begin: cython.int = (self.first + self.count) % self.room * self.stride
        for i in range(len(integers)):
            self.kept[begin + i] = integers[i]
        self.count += 1

    def proceed(self):
        """Carry out groups as long as a call wants some, or this rank must get rid of them."""
        begin: cython.int
        asked: cython.longlong
        while self.count > 0 and (self.waiting or self.unanswered > 0):
            begin = self.first * self.stride
            asked = self.kept[begin + 1]
            self.record.read(self.kept, begin + HEADER)
            self.first = (self.first + 1) % self.room
            self.count -= 1
            self.port.reduce(self.record)
            if self.waiting and (asked == ANY or asked == self.rank):
                self.end_call()

    def end_call(self):
        """The call returns, once what comes before has been averaged."""
        self.waiting = False
        self.port.return_model()

    def end_alone(self):
        """The call returns without a group."""
        self.alone += 1
        self.end_call()

    def send(self, rank, kind, flag):
        """Send a message without a group."""
        self.message[0] = kind
        self.message[1] = self.pauses
        self.message[2] = flag
        self.port.send(rank, self.message[:3])

    # The controller

    def answer(self, source, formed):
        """Tell of the groups that a request has made, or that it makes none."""
        index: cython.int
        i: cython.int
        end: cython.int
        if formed < 0:
            self.send(source, NOBODY, False)
        for index in range(formed):
            self.generator.write(index, self.record)
            self.message[0] = GROUP
            self.message[1] = ANY if self.generator.smart else source
            end = self.record.write(self.message, HEADER)
            for i in range(self.record.size):
                self.port.send(self.record.members[i], self.message[:end])
