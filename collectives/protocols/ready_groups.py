"""Partial Reduce: the ranks that are ready first average, in groups of P' ranks.

A call sends a ready signal, with the rank's iteration number, to one rank's controller
(`ready_controller`), and waits for the group that it forms. The members learn the group, their
weights, and the newest member's iteration number, which all of them take over.

Source: Miao et al., Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce,
SIGMOD 2021, Algorithm 2 and section 3.3.3.
"""

import array

import cython

from collectives.protocols.formed_groups import Group, GroupProtocol

# The kinds of messages to the controller, ...
READY = 0
PAUSE = 1
LEAVE = 2
OVERDUE = 3
# ... and from it: a group; that a pause or leave is noted.
GROUP = 4
NOTED = 5

# The share of the initial model is sent as a multiple of this.
SHARE = 1 / 2**53


class ReadyGroupProtocol(GroupProtocol):
    """One rank of Partial Reduce.

    Args:
        port, rank, size: see `GroupProtocol`.
        controller_rank: the rank whose engine has the controller.
        controller: on that rank a `PartialReduceController`, None on others.

    Attributes:
        controller: as given.
        iteration: that of this rank's model: one more in each call, then that of its group's
            newest model.
        initial_share: the initial model's share in the mean of this call's group, if dynamic
            weights give it one; initial_total: the sum over all groups.
        fresh: to be set, while the application is in no call, once all ranks have the same model.
    """

    def __init__(self, port, rank, size, controller_rank, controller):
        GroupProtocol.__init__(self, port, rank, size)
        self.controller_rank = controller_rank
        self.controller = controller
        self.iteration = 0
        self.initial_share = 0
        self.initial_total = 0
        self.fresh = False
        self.pauses = 0
        # Number of pauses that the controller has not noted yet.
        self.unknown = 0
        # Whether the call's group is known.
        self.grouped = False
        self.group = Group(room=size)
        self.message = array.array("q", [0]) * (6 + 2 * size)

    def begin(self):
        if self.controller is not None:
            self.controller.restart_times()

    def call(self):
        GroupProtocol.call(self)
        self.iteration += 1
        self.initial_share = 0
        if self.skips():
            return
        self.grouped = False
        self.notify(READY)
        self.fresh = False

    def pause(self):
        self.pauses += 1
        self.unknown += 1
        self.notify(LEAVE if self.leaving else PAUSE)

    def overdue(self):
        if self.calling and not self.grouped:
            self.notify(OVERDUE)

    def restart(self, calls):
        GroupProtocol.restart(self, calls)
        self.fresh = True

    def notify(self, kind):
        """Send the controller a message of this kind."""
        self.message[0] = kind
        self.message[1] = self.iteration
        self.message[2] = self.pauses
        self.message[3] = self.fresh
        self.port.send(self.controller_rank, self.message[:4])

    def arrived(self, source, integers):
        kind: cython.longlong = integers[0]
        if kind == GROUP:
            self.iteration = integers[1]
            self.initial_share = integers[2] * SHARE
            self.initial_total += self.initial_share
            self.grouped = True
            self.group.read(integers, 3)
            self.port.reduce(self.group)
            self.port.return_model()
        elif kind == NOTED:
            self.unknown -= 1
        else:
            self.control(source, kind, integers[1], integers[2], integers[3] != 0)

    def is_quiet(self):
        return not self.calling and self.unknown == 0

    def waits_for(self, rank):
        if self.calling and not self.grouped:
            return rank != self.rank
        return self.unknown > 0 and rank == self.controller_rank

    # The controller's rank

    def passed(self, time):
        if self.controller is not None:
            self.controller.now = time

    def fell_due(self):
        self.form(True)

    def control(self, source, kind, iteration, pauses, fresh):
        """Handle a rank's message to the controller, and send the answers."""
        if kind == READY:
            self.controller.signal(source, iteration, pauses, fresh)
        elif kind == OVERDUE:
            while self.controller.release(source):
                self.broadcast()
        else:
            if self.controller.withdraw(source, iteration, pauses, kind == LEAVE):
                self.broadcast()
            self.message[0] = NOTED
            self.port.send(source, self.message[:1])
        self.form(False)

    def form(self, judges):
        """Form groups while there are ranks for them; see the controller's `judges`."""
        self.controller.judges = judges
        while self.controller.form():
            self.broadcast()
        self.due = self.controller.due

    def broadcast(self):
        """Send the group that was formed last to its members."""
        i: cython.int
        self.message[0] = GROUP
        self.message[1] = self.controller.newest
        self.message[2] = cython.cast(cython.longlong, self.controller.initial / SHARE + 0.5)
        end: cython.int = self.controller.group.write(self.message, 3)
        for i in range(self.controller.group.size):
            self.port.send(self.controller.group.members[i], self.message[:end])
