"""The wait-avoiding collective, as one rank sees it.

Any rank may start a version; it then reaches all others along the activation tree, and each takes
part with what its application last published, wherever that application is. Versions are executed
one at a time and in order. A synchronous operation first agrees on what all ranks are about to do;
data moves only after that, and no version crosses it.

Source: WAGMA-SGD, section III-A (activation, versions, asynchronous execution) and Algorithm 2;
synchronous operations other than its periodic one, and closing, go beyond the paper. Versions that
one rank starts, drawn for each: eager-SGD (Li et al., PPoPP 2020), majority collectives; what
happens when that rank does not come goes beyond it.
"""

import cython

# Who has the vectors (snapshot and result): nobody, the application, or the running version; or
# they are open to other ranks, which execute versions for this one (see `claims`).
IDLE = 0
HELD = 1
RUNNING = 2
SHARED = 3

# The synchronous operations.
NONE = 0
SYNC = 1
AVERAGE = 2
SYNCHRONIZE = 3
CLOSE = 4
LOAD = 5
JOIN = 6
FINISH = 7

# How far a synchronous operation has come.
OUTSIDE = 0
AGREEING = 1
DRAINING = 2
REDUCING = 3
LEAVING = 4

# Of the numbers that are drawn.
WORD = 0xFFFFFFFFFFFFFFFF
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def drawn(seed, version, size):
    """Return which of so many ranks is drawn for a version: uniformly, and alike everywhere.

    Source: SplitMix64, of Steele, Lea and Flood, Fast splittable pseudorandom number generators,
    OOPSLA 2014.
    """
    z: cython.ulonglong = (seed + (version + 1) * GAMMA) & WORD
    z = ((z ^ (z >> 30)) * MIX_1) & WORD
    z = ((z ^ (z >> 27)) * MIX_2) & WORD
    return (z ^ (z >> 31)) % size


class WaitAvoidingProtocol:
    """The state of one rank: told of events by its methods, it says in attributes what to do.

    The driver executes version `running` while `vectors` is RUNNING, sends the activation
    ``(sent[k], sent_ops[k])`` on every dimension k whose bit in `due` is set, and a FIN after it
    where the bit in `fin_due` is set; it clears the bits. A later activation may overtake one that
    is still due, since a message covers every lower version. While `stage` is AGREEING it gathers
    the pair ``(operation, t)`` from every rank; while it is REDUCING it averages over all ranks,
    but for LOAD, in which each rank replaces its own vectors. Where a bit in `notice_due` is set it
    sends on that dimension that rank `failed` has failed, and where one in `freed_due` is set, that
    versions after `freed` operations are free.

    A driver whose rank `shares` its vectors opens them where `vectors` has become SHARED, and takes
    them back before it tells of anything that the application does. Meanwhile `next` stands still.

    Attributes:
        t: the application's next version; `next`: the next version to be executed here.
        base: what to add to any version for the number that users see, and that chooses groups and
            synchronizations; versions themselves only grow, also where a LOAD goes back.
        told, told_ops: the highest version heard of, and after how many operations it was started.
        sent, sent_ops: the highest version sent on each dimension, likewise.
        ops: synchronous operations completed.
        vectors: IDLE, HELD by the application, RUNNING, or SHARED with other ranks.
        shares: whether they are shared while the application computes.
        timely: whether the vector of the application's last call is in that call's version.
        waiting: whether the application waits for the running version to finish.
        size: of how many ranks one is drawn for each version, which alone may start it; 0: anybody
            may start any.
        freed: after how many operations versions are free: anybody may start them, since a rank is
            in the next operation already, and may be the one that is drawn; −1: after none.
        source: the newest version whose result may be used; −1 where there is none.
        operation, stage: the synchronous operation that this rank is in, and how far it has come.
        joined: whether the application has no more steps to make, and this rank takes part in
            the others' operations until all have joined (JOIN, and FINISH for the end of it).
        broken: whether an operation did not agree, after which only CLOSE may follow.
        failed: the first rank of whose failure this one has heard; −1 where there is none.
        fin_at: the version before which all ranks leave, once all are closing; else −1.
    """

    def __init__(self, dimensions, group_size, sync_period, passive):
        self.dimensions = dimensions
        self.exchanges = group_size > 1
        self.sync_period = sync_period
        self.passive = passive
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
        self.t = 0
        self.next = 0
        self.told = -1
        self.told_ops = 0
        self.ops = 0
        self.vectors = IDLE
        self.running = -1
        self.timely = False
        self.waiting = False
        self.source = -1
        self.operation = NONE
        self.stage = OUTSIDE
        self.joined = False
        self.broken = False
        self.failed = -1
        self.fin_at = -1
        self.base = 0
        self.due = 0
        self.notice_due = 0
        self.noticed = 0
        self.fin_due = 0
        self.fin_seen = 0

    def draw(self, rank, size, seed):
        """Let each version be started only by the one of so many ranks that is drawn for it."""
        self.rank = rank
        self.size = size
        self.seed = seed

    # Versions

    def tell(self, version, ops, dimension):
        """An activation came in on this dimension (−1: this rank's own): forward it, then execute.

        It is forwarded on every higher dimension that has not carried this version yet, also by a
        rank that knew of the version already: each dimension below was another branch of the tree.
        """
        j: cython.int
        if self.fin_at >= 0:
            return
        for j in range(dimension + 1, self.dimensions):
            if self.sent[j] < version:
                self.sent[j] = version
                self.sent_ops[j] = ops
                self.due |= 1 << j
        if version > self.told:
            self.told = version
            self.told_ops = ops
        self.run()

    def run(self):
        """Start the next version if it may be executed now; or leave that to whoever needs it."""
        if self.shares and self.vectors == IDLE and self.stage == OUTSIDE and not self.waiting:
            self.vectors = SHARED
        else:
            self.execute()

    def execute(self):
        """Start the next version here, if it may be executed now.

        A version is held back until this rank has completed every operation that came before it,
        so that no contribution crosses a synchronization. Where nobody is passive it also waits
        for the application's call, unless that will never come.
        """
        if self.vectors != IDLE or self.next > self.told or self.told_ops > self.ops:
            return
        called: cython.bint = self.waiting or self.next < self.t
        if not (self.passive or called or self.operation != NONE or self.broken):
            return
        self.vectors = RUNNING
        self.running = self.next

    def executed(self, version):
        """Others have executed every version before this one for this rank."""
        if version > self.next:
            self.next = version
            self.source = version - 1
            self.heard(version - 1)

    def reclaim(self, running):
        """The vectors are open to others no longer; one of them may have begun version `next`."""
        self.vectors = IDLE
        if running:
            self.vectors = RUNNING
            self.running = self.next
            self.heard(self.next)

    def heard(self, version):
        """A version has been started, after no more operations than this rank has completed."""
        if version > self.told:
            self.told = version
            self.told_ops = self.ops

    def finished(self):
        """The running version has been executed: its result is there."""
        self.source = self.running
        self.next = self.running + 1
        self.vectors = IDLE
        if self.waiting:
            self.waiting = False
            self.vectors = HELD
        self.run()
        self.settle()

    def notice(self, rank, dimension):
        """A rank has failed, as came in on this dimension (−1: this rank itself): spread it.

        It is forwarded as an activation is.
        """
        j: cython.int
        if self.fin_at >= 0:
            return
        if self.failed < 0:
            self.failed = rank
        for j in range(dimension + 1, self.dimensions):
            if not self.noticed >> j & 1:
                self.noticed |= 1 << j
                self.notice_due |= 1 << j

    # The application's call of a version

    def call(self):
        """The application arrives at its version t.

        Timely: nobody has started t here. The application holds the vectors while it publishes, and
        `published` hands them to the version. Late: it holds them as soon as no version runs, and
        publishes and takes the newest result in one go.
        """
        self.timely = self.next == self.t and self.vectors == IDLE
        if self.timely:
            self.vectors = HELD
            if self.may_start(self.t):
                self.start(self.t)
        elif self.vectors == RUNNING:
            self.waiting = True
        else:
            self.vectors = HELD

    def may_start(self, version):
        """Whether this rank may start a version whose call its application makes."""
        if self.size == 0 or self.freed == self.ops:
            return True
        return drawn(self.seed, version + self.base, self.size) == self.rank

    def start(self, version):
        """Start a version, on all ranks that exchange anything in it."""
        if self.exchanges:
            self.tell(version, self.ops, -1)
        else:
            self.told = version
            self.told_ops = self.ops

    def awaited(self):
        """Return the version that the application has called and nobody has started; else −1.

        An interrupted call has been made, though `t` is beyond it.
        """
        called: cython.longlong = self.t if self.waiting else self.t - 1
        return called if called >= self.next and called > self.told else -1

    def free(self, ops, dimension):
        """Versions after so many operations are free, as came in on this dimension.

        (−1: since this rank is in the next operation itself.) It is forwarded as an activation is.
        What is heard later of fewer operations is of use to nobody: all ranks have been in those.
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
        """Start what the application waits for, if that has become free."""
        version: cython.longlong = self.awaited()
        if version >= 0 and self.freed == self.ops:
            self.start(version)

    def published(self):
        """A timely application has published: execute, and let it have the vectors afterwards."""
        self.waiting = True
        self.vectors = IDLE
        self.start_awaited()
        self.run()

    def returns(self):
        """The application has taken what its call returns."""
        self.t += 1
        self.release()

    def release(self):
        """The application no longer holds the vectors."""
        self.vectors = IDLE
        self.run()

    def hold(self):
        """The application wants the vectors between two calls, to publish without taking part."""
        if self.vectors == RUNNING:
            self.waiting = True
        else:
            self.vectors = HELD

    def abandon(self):
        """The application was interrupted in its call; the version, if started, goes on.

        Only when that has been executed, and `next` is `t` or more again, may the application make
        another call or enter an operation; it may close before.
        """
        self.waiting = False
        self.t += 1
        self.start_awaited()
        if self.vectors != RUNNING:
            self.release()

    # Synchronous operations

    def is_synchronous(self):
        """Whether the application's next version is the periodic global average."""
        return (self.t + self.base + 1) % self.sync_period == 0

    def enter(self, operation):
        """The application enters a synchronous operation: gather (operation, t) from all ranks."""
        if operation == JOIN:
            self.joined = True
        self.operation = operation
        self.stage = AGREEING
        # Before a periodic synchronization every rank has started what it was drawn for.
        if self.size > 0 and operation != SYNC:
            self.free(self.ops, -1)
        self.run()

    def agreed(self, records, size):
        """Every rank has entered an operation; `records` holds each one's (operation, t).

        If all are the same it begins. Ranks that have joined take part in any average of the
        others, unless they had made more calls, and once all have joined, all finish. If all close,
        the versions that anybody has started are executed, FIN is sent, and nothing is forwarded
        any more. Otherwise whoever is not closing is broken, and who is closes anew.
        """
        r: cython.int
        kind: cython.int
        common: cython.int = JOIN
        same: cython.bint = True
        joins: cython.bint = False
        joined_at: cython.longlong = 0
        at: cython.longlong = 0
        last: cython.longlong = 0
        for r in range(size):
            kind = records[2 * r]
            if records[2 * r + 1] > last:
                last = records[2 * r + 1]
            if kind == JOIN:
                joins = True
                if records[2 * r + 1] > joined_at:
                    joined_at = records[2 * r + 1]
            elif common == JOIN:
                common = kind
                at = records[2 * r + 1]
            elif kind != common or (records[2 * r + 1] != at and common != CLOSE):
                same = False
        averages: cython.bint = common != CLOSE and common != LOAD
        if joins and common != JOIN and not (averages and joined_at <= at):
            same = False
        if not same:
            self.ops += 1
            if self.operation == CLOSE:
                self.stage = AGREEING
            else:
                self.broken = True
                self.joined = False
                self.operation = NONE
                self.stage = OUTSIDE
            self.run()
        elif common == CLOSE:
            self.ops += 1
            self.stage = LEAVING
            self.fin_at = last
            self.fin_due = (1 << self.dimensions) - 1
            self.told = last - 1
            self.told_ops = self.ops
            self.run()
        elif common == JOIN:
            self.operation = FINISH
            self.drain(last)
        else:
            self.operation = common
            self.drain(at)

    def drain(self, t):
        """Execute what comes before version t, which a rank that has joined may have to, and move.

        Every version before t has been started, since a rank that has made t calls is there.
        """
        self.t = t
        self.stage = DRAINING
        if self.told < t - 1:
            self.told = t - 1
            self.told_ops = self.ops
        self.run()
        self.settle()

    def settle(self):
        """Begin to move once everything before has been executed."""
        if self.stage == DRAINING and self.vectors == IDLE and self.next >= self.t:
            self.stage = REDUCING
            self.vectors = HELD

    def reduced(self):
        """The average over all ranks is there, and the application has taken it.

        It is published everywhere by all of them but AVERAGE, which changes nothing. A rank that
        has joined waits for the next operation.
        """
        if self.operation != AVERAGE:
            self.source = -1
        if self.operation == SYNC:
            self.t += 1
            self.next = self.t
        if self.operation == FINISH:
            self.joined = False
        self.operation = JOIN if self.joined else NONE
        self.stage = AGREEING if self.joined else OUTSIDE
        self.ops += 1
        if self.size > 0 and self.joined:
            self.free(self.ops, -1)
        self.release()

    # Closing

    def fin(self, dimension):
        """The neighbor on this dimension sends nothing any more."""
        self.fin_seen |= 1 << dimension

    def may_leave(self):
        """Whether everything started has been executed and nothing is under way to this rank."""
        return (
            self.stage == LEAVING
            and self.next >= self.fin_at
            and self.vectors != RUNNING
            and self.due == 0
            and self.notice_due == 0
            and self.freed_due == 0
            and self.fin_due == 0
            and self.fin_seen == (1 << self.dimensions) - 1
        )
