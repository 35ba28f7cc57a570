"""The wait-avoiding collective, as one rank sees it.

Any rank may start a version. Its activation reaches all others along the activation tree, and each
takes part with its application's last snapshot, even while that application computes. Versions are
executed one at a time and in order, and none crosses a synchronous operation of all ranks.

Source: WAGMA-SGD, section III-A (activation, versions, asynchronous execution) and Algorithm 2.
Versions started by a rank that is drawn for each: eager-SGD (Li et al., PPoPP 2020), majority
collectives; what happens if that rank does not arrive goes beyond it.
"""

import cython

from collectives.protocols.all_ranks import AllRanksProtocol

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.all_ranks import AVERAGE, DRAINING, LEAVING, NONE, OUTSIDE, SYNC

# The owner of the vectors (snapshot and result): none, the application, or the running version; or
# other ranks can use them to execute versions for this one (see `claims`).
IDLE = 0
HELD = 1
RUNNING = 2
SHARED = 3

# Constants of SplitMix64.
WORD = 0xFFFFFFFFFFFFFFFF
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def drawn(seed, version, size):
    """Return which of `size` ranks is drawn for a version: uniformly, and the same on all ranks.

    Source: SplitMix64, of Steele, Lea and Flood, Fast splittable pseudorandom number generators,
    OOPSLA 2014.
    """
    z: cython.ulonglong = (seed + (version + 1) * GAMMA) & WORD
    z = ((z ^ (z >> 30)) * MIX_1) & WORD
    z = ((z ^ (z >> 27)) * MIX_2) & WORD
    return (z ^ (z >> 31)) % size


class WaitAvoidingProtocol(AllRanksProtocol):
    """The state of one rank: events call its methods; its attributes tell the driver what to do.

    The driver executes version `running` while `vectors` is RUNNING. A later activation may
    replace one that is still due on its dimension, since a message covers every lower version.
    `AllRanksProtocol` has the operations, and sends the messages that are due.

    If a rank `shares` its vectors, they are opened when `vectors` becomes SHARED, and taken back
    before any event of the application is reported. Meanwhile `next` is unchanged.

    Attributes:
        version: see `AllRanksProtocol`; `next`: the next version to be executed here.
        base: the number of a version for users, minus the version. That number determines groups
            and synchronizations; versions themselves only grow, even if a LOAD goes back.
        started, started_ops: the highest version known to have been started, and after how many
            operations that was.
        sent, sent_ops: the highest version sent on each dimension, and its number of operations.
        vectors: IDLE, HELD by the application, RUNNING, or SHARED with other ranks.
        shares: whether they are shared while the application computes.
        timely: whether the vector of the application's last call is in that call's version.
        waiting: whether the application waits for the running version to finish.
        size: the number of ranks, of which one is drawn for each version and alone may start it;
            0: any rank may start any version.
        own_pace: whether ranks make any number of calls: see `own_pace`.
        freed: the number of operations after which any rank may start versions, because the rank
            drawn may be in the next operation already; −1: there is none.
        source: the newest version whose result may be used; −1: none.
    """

    def __init__(self, dimensions, group_size, sync_period, passive):
        AllRanksProtocol.__init__(self, dimensions)
        self.exchanges = group_size > 1
        self.sync_period = sync_period
        self.passive = passive
        self.own_pace = False
        self.shares = False
        self.rank = 0
        self.size = 0
        self.seed = 0
        self.freed = -1
        self.freed_sent = 0
        self.freed_due = 0
        if not cython.compiled:
            self.sent = [-1] * dimensions
            self.sent_ops = [0] * dimensions
        k: cython.int
        for k in range(dimensions):
            self.sent[k] = -1
            self.sent_ops[k] = 0
        self.next = 0
        self.started = -1
        self.started_ops = 0
        self.vectors = IDLE
        self.running = -1
        self.timely = False
        self.waiting = False
        self.source = -1
        self.due = 0

    def draw(self, rank, size, seed):
        """Let only one of `size` ranks start each version: the one that is drawn for it."""
        self.rank = rank
        self.size = size
        self.seed = seed

    def share(self, works):
        """Let other ranks execute versions for this one, if its memory `works` for that."""
        self.shares = works and self.passive and self.exchanges

    def due_on(self):
        return self.due | self.freed_due | AllRanksProtocol.due_on(self)

    def send_on(self, dimension):
        if self.due >> dimension & 1:
            self.due &= ~(1 << dimension)
            self.port.send_activation(dimension, self.sent[dimension], self.sent_ops[dimension])
        elif self.freed_due >> dimension & 1 and not self.notice_due >> dimension & 1:
            self.freed_due &= ~(1 << dimension)
            self.port.send_free(dimension, self.freed)
        else:
            AllRanksProtocol.send_on(self, dimension)

    # Versions

    def activate(self, version, ops, dimension):
        """Forward an activation that arrived on this dimension (−1: this rank's own), then execute.

        It is forwarded on every higher dimension that has not carried this version yet, even by a
        rank that knew of the version already: each lower dimension led to another branch of the
        tree.
        """
        j: cython.int
        if self.fin_at >= 0:
            return
        for j in range(dimension + 1, self.dimensions):
            if self.sent[j] < version:
                self.sent[j] = version
                self.sent_ops[j] = ops
                self.due |= 1 << j
        if version > self.started:
            self.started = version
            self.started_ops = ops
        self.run()

    def run(self):
        """Start the next version if it may be executed now, or let a rank that needs it do so."""
        if self.shares and self.vectors == IDLE and self.stage == OUTSIDE and not self.waiting:
            self.vectors = SHARED
        else:
            self.execute()

    def execute(self):
        """Start the next version on this rank, if it may be executed now.

        A version is held back until this rank has completed every operation that came before it,
        so that no contribution crosses a synchronization. If no rank is passive it also waits
        for the application's call, unless none will follow.
        """
        if self.vectors != IDLE or self.next > self.started or self.is_held_back():
            return
        called: cython.bint = self.waiting or self.next < self.version
        if not (self.passive or called or self.operation != NONE or self.broken):
            return
        self.vectors = RUNNING
        self.running = self.next

    def is_held_back(self):
        """Return whether the next version came after an operation that is not complete here.

        At the ranks' own pace others may have loaded, and gone on, while this one still executes
        what came before.
        """
        drains: cython.bint = self.stage == DRAINING and self.next < self.version
        return self.started_ops > self.ops and not drains

    def executed(self, version):
        """Note that others have executed every version before this one for this rank."""
        if version > self.next:
            self.next = version
            self.source = version - 1
            self.note_started(version - 1)

    def reclaim(self, running):
        """Take the vectors back from other ranks, one of which may have begun version `next`."""
        self.vectors = IDLE
        if running:
            self.vectors = RUNNING
            self.running = self.next
            self.note_started(self.next)

    def note_started(self, version):
        """Note that a version was started, after no more operations than completed here."""
        if version > self.started:
            self.started = version
            self.started_ops = self.ops

    def finished(self):
        """Note that the running version has been executed, so that its result is available."""
        self.source = self.running
        self.next = self.running + 1
        self.vectors = IDLE
        if self.waiting:
            self.waiting = False
            self.vectors = HELD
        self.run()
        self.settle()

    # The application's call of a version

    def call(self):
        """Begin the application's call of its version.

        Timely: the version has not been started here. The application holds the vectors while it
        publishes, and `published` hands them to the version. Late: it holds them as soon as no
        version runs, and publishes and takes the newest result at once.
        """
        self.timely = self.next == self.version and self.vectors == IDLE
        if self.timely:
            self.vectors = HELD
            if self.may_start(self.version):
                self.start(self.version)
        elif self.vectors == RUNNING:
            self.waiting = True
        else:
            self.vectors = HELD

    def may_start(self, version):
        """Return whether this rank may start a version that its application calls."""
        if self.size == 0 or self.freed == self.ops:
            return True
        return drawn(self.seed, version + self.base, self.size) == self.rank

    def start(self, version):
        """Start a version on all ranks, or on this one only if groups have one member."""
        if self.exchanges:
            self.activate(version, self.ops, -1)
        else:
            self.started = version
            self.started_ops = self.ops

    def awaited(self):
        """Return the version that the application has called and no rank has started; else −1.

        An interrupted call counts as made, though `version` is already past it.
        """
        called: cython.longlong = self.version if self.waiting else self.version - 1
        return called if called >= self.next and called > self.started else -1

    def free(self, ops, dimension):
        """Free the versions after `ops` operations, as a message on this dimension says.

        (−1: because this rank itself is in the next operation.) The message is forwarded as an
        activation is. One about fewer operations is late and dropped: all ranks have been in those.
        """
        j: cython.int
        if self.fin_at >= 0 or ops < self.freed:
            return
        if ops > self.freed:
            self.freed = ops
            self.freed_sent = 0
            self.freed_due = 0
        for j in range(dimension + 1, self.dimensions):
            if not self.freed_sent >> j & 1:
                self.freed_sent |= 1 << j
                self.freed_due |= 1 << j
        self.start_awaited()

    def start_awaited(self):
        """Start the version that the application waits for, if it has become free."""
        version: cython.longlong = self.awaited()
        if version >= 0 and self.freed == self.ops:
            self.start(version)

    def published(self):
        """Hand the vectors of a timely call, which has published, to its version, and run it."""
        self.waiting = True
        self.vectors = IDLE
        self.start_awaited()
        self.run()

    def publishes_for(self):
        """Return the first version that a vector published in a call is for."""
        return self.version

    def returned(self):
        """Return the version that the application's call, which has taken its result, is of."""
        return self.version

    def returns(self):
        """Complete the application's call, which has taken its result."""
        self.version += 1
        self.completed()
        self.release()

    def release(self):
        """Note that the application no longer holds the vectors."""
        self.vectors = IDLE
        self.run()

    def hold(self):
        """Hold the vectors between two calls, to publish without taking part in a version."""
        if self.vectors == RUNNING:
            self.waiting = True
        else:
            self.vectors = HELD

    def let_go(self):
        """Release the vectors of an application interrupted while it held or awaited them."""
        self.waiting = False
        if self.vectors == HELD:
            self.release()

    def abandon(self):
        """Abandon the application's interrupted call; the version, if started, goes on.

        Only when that version has been executed, and `next` is at least `version` again, may the
        application make another call or enter an operation; it may close before.
        """
        self.waiting = False
        self.version += 1
        self.start_awaited()
        if self.vectors != RUNNING:
            self.release()

    # Averages over all ranks

    def is_of_all(self, version):
        """Return whether a version averages over all ranks, at their own pace."""
        return self.own_pace and (version + self.base + 1) % self.sync_period == 0

    def is_synchronous(self):
        """Return whether the application's next version is the periodic synchronization."""
        return (self.version + self.base + 1) % self.sync_period == 0

    def enter(self, operation):
        AllRanksProtocol.enter(self, operation)
        # Before a periodic synchronization every rank has started the versions drawn for it.
        if self.size > 0 and operation != SYNC:
            self.free(self.ops, -1)

    def expect(self, version):
        """Note that every version before this one has been started, since a rank has reached it."""
        if self.started < version - 1 or self.stage == LEAVING:
            self.started = version - 1
            self.started_ops = self.ops

    def is_drained(self):
        return self.vectors == IDLE and self.next >= self.version

    def reduced(self):
        """End the operation; all but AVERAGE, which changes nothing, publish their average."""
        if self.operation != AVERAGE:
            self.source = -1
        if self.operation == SYNC:
            self.version += 1
            self.next = self.version
            if not self.joined:
                self.completed()
        AllRanksProtocol.reduced(self)
        if self.size > 0 and self.joined:
            self.free(self.ops, -1)

    # Closing

    def is_done(self):
        return (
            self.next >= self.fin_at
            and self.vectors != RUNNING
            and self.due == 0
            and self.freed_due == 0
        )
