"""Averages over all ranks that any rank may start: local SGD with ranks of unequal speed.

A call ends a step of its rank. The first rank that has made τ calls since the last average starts
the next one, and tells all others along the control tree; each takes part in its next call. So they
wait for a rank until the end of its current step, not of its τ-th step.

Source: local SGD (Stich, ICLR 2019); averages that the fastest rank starts, of ranks that have done
unequal work, are WP-SGD's setting (Cheng et al., Algorithm 5).
"""

import cython

from collectives.protocols.all_ranks import AllRanksProtocol
from collectives.protocols.contribution import ContributionProtocol
from collectives.protocols.rank import RankProtocol

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.all_ranks import AVERAGE, CLOSE, FINISH, JOIN, SYNC
    from collectives.protocols.contribution import NOWHERE, SCRATCH, X


class TriggeredAverageProtocol(AllRanksProtocol):
    """The state of one rank: `call` returns whether its application has to average now.

    If so, the rank enters SYNC. Averages are numbered as versions; their activations do not use the
    number of operations. An activation that arrives after its average has no effect.

    Args:
        dimensions: see `AllRanksProtocol`.
        sync_period: τ: a rank's τ-th call since the last average starts the next one.

    Attributes:
        made: how many calls this rank has made since the last average over all ranks.
        started: the newest average known to have been started; −1: none.
    """

    def __init__(self, dimensions, sync_period):
        AllRanksProtocol.__init__(self, dimensions)
        self.sync_period = sync_period
        self.made = 0
        self.started = -1
        self.due = 0
        self.sent = 0

    def due_on(self):
        return self.due | AllRanksProtocol.due_on(self)

    def send_on(self, dimension):
        if self.due >> dimension & 1:
            self.due &= ~(1 << dimension)
            self.port.send_activation(dimension, self.started, self.ops)
        else:
            AllRanksProtocol.send_on(self, dimension)

    def activate(self, version, dimension):
        """Note an average that was started, and forward its activation.

        The activation arrived on this dimension (−1: this rank started the average), and is
        forwarded on every higher dimension that has not carried it yet. That of an older average is
        dropped, since all ranks take part in each.
        """
        j: cython.int
        if self.fin_at >= 0 or version < self.started:
            return
        if version > self.started:
            self.started = version
            self.due = 0
            self.sent = 0
        for j in range(dimension + 1, self.dimensions):
            if not self.sent >> j & 1:
                self.sent |= 1 << j
                self.due |= 1 << j

    def averages(self):
        """Return whether a call made now would take part in an average."""
        return self.started >= self.version or self.made + 1 >= self.sync_period

    def call(self):
        """Begin a call of the application; return whether it takes part in an average now."""
        self.made += 1
        if self.made >= self.sync_period:
            self.activate(self.version, -1)
        return self.started >= self.version

    def reduced(self):
        if self.operation != AVERAGE:
            self.made = 0
        if self.operation == SYNC:
            self.version += 1
            if not self.joined:
                self.completed()
        AllRanksProtocol.reduced(self)

    def is_done(self):
        return self.due == 0


class HeldContribution(ContributionProtocol):
    """A rank's contribution to these averages: the vector with which its application waits.

    A rank that has joined lends its vector to the others' next average, and its vector becomes
    that average's mean; after that its weight is 0 until all have joined.
    """

    def called(self):
        """Note a call: an average outside calls uses its weight."""
        self.published_weight = self.given_weight

    def contribute(self, publishes):
        ContributionProtocol.contribute(self, publishes)
        if publishes:
            self.finite = self.lent
            if not self.finite:
                self.leave_out()

    def is_averaging(self):
        return ContributionProtocol.is_averaging(self) or (
            self.present and (self.operations.operation in (JOIN, FINISH))
        )

    def is_lending(self):
        """Return whether others average, and this rank only contributes its vector."""
        return self.operations.joined and self.operations.operation == AVERAGE

    def begin_average(self):
        if not self.contributed:
            if self.is_lending():
                self.contribute_ahead()
            else:
                self.contribute(self.present)
        self.contributed = False
        self.aim_average()

    def aim_average(self):
        """Store the mean in the application's vector, unless this rank only contributes."""
        takes: cython.bint = self.present and not self.is_lending()
        self.lent = self.lent and takes
        self.source = SCRATCH
        self.target = X if self.lent else SCRATCH
        self.copy = X if takes and not self.lent else NOWHERE
        self.saved = NOWHERE

    def end_average(self):
        operation: cython.int = self.operations.operation
        if operation == AVERAGE:
            return
        self.restart_work()
        if self.operations.joined and operation != FINISH:
            self.given_weight = 0

    def load(self):
        self.restart_work()


class TriggeredRankProtocol(RankProtocol):
    """One rank of these averages, and its application's calls.

    Args:
        triggering, held: its `TriggeredAverageProtocol` and its `HeldContribution`.

    Attributes:
        alone: whether the last call has averaged nothing.
    """

    def __init__(self, triggering, held):
        RankProtocol.__init__(self, triggering, held)
        self.triggering = triggering
        self.held = held
        self.alone = False

    def enter(self, operation):
        if operation != CLOSE:  # which keeps the result of a call that has been started
            self.alone = False
        RankProtocol.enter(self, operation)

    def call(self):
        """Begin the application's call: an average over all ranks, or nothing."""
        self.held.called()
        if self.triggering.call():
            self.enter(SYNC)
            return
        self.alone = True
        self.called = self.operations.version
        self.weight = self.held.given_weight
        self.operations.completed()
        self.timely += 1
        self.done = True
        self.port.returns(False)

    def passes_by(self):
        """Return whether a call averages nothing: then it needs no vector, else it is not made."""
        self.alone = not self.triggering.averages()
        self.done = True
        return self.alone
