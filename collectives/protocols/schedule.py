"""The allreduce of one group, as the steps of one of its members.

Recursive doubling: in phase p the members whose places differ in bit p exchange their partial sums
and add. In a group whose size is not a power of two, each surplus member first sends its vector to
another member, and receives the sum at the end. All members end with the same sum, bit for bit: the
two sides of an exchange add the same two numbers, and addition commutes.
"""

import cython

NOTHING = 0
ADD = 1
TAKE = 2


class Schedule:
    """Steps through the exchanges of the member at place `me` in a group of `size` members.

    Attributes:
        done: whether no step is left.
        peer: the place of the member that the current step exchanges with.
        sends: whether the step sends the partial sum to it.
        receives: NOTHING; or the peer's numbers, to ADD to the partial sum, or to TAKE as the sum.
        phase: number of the step, the same on both sides.
    """

    def begin(self, size, me):
        """Start at the first step; a group of one member has none."""
        self.size = size
        self.me = me
        self.core = 1
        self.phases = 0
        while 2 * self.core <= size:
            self.core *= 2
            self.phases += 1
        self.phase = -1
        self.done = False
        self.advance()

    def advance(self):
        """Advance to this member's next step, or to the end."""
        surplus: cython.int = self.size - self.core
        self.phase += 1
        while self.phase <= self.phases + 1:
            self.sends = False
            self.receives = NOTHING
            if self.phase == 0 and self.me >= self.core:
                self.sends = True
                self.peer = self.me - self.core
            elif self.phase == 0 and self.me < surplus:
                self.receives = ADD
                self.peer = self.me + self.core
            elif 1 <= self.phase <= self.phases and self.me < self.core:
                self.sends = True
                self.receives = ADD
                self.peer = self.me ^ (1 << (self.phase - 1))
            elif self.phase == self.phases + 1 and self.me >= self.core:
                self.receives = TAKE
                self.peer = self.me - self.core
            elif self.phase == self.phases + 1 and self.me < surplus:
                self.sends = True
                self.peer = self.me + self.core
            if self.sends or self.receives != NOTHING:
                return
            self.phase += 1
        self.done = True
