"""Operations of all ranks, as one of them sees them: agreement, averages, failures and closing.

A synchronous operation first agrees on the operation of all ranks; data moves only after that.
Subclasses define what ranks do outside these operations, and must have completed before one.

Source: WAGMA-SGD, section III-A and Algorithm 2, has the periodic synchronization only; agreement,
the other operations, failures and closing go beyond the paper.
"""

import cython

# The synchronous operations.
NONE = 0
SYNC = 1
AVERAGE = 2
SYNCHRONIZE = 3
CLOSE = 4
LOAD = 5
JOIN = 6
FINISH = 7
MEET = 8

# How far a synchronous operation has come.
OUTSIDE = 0
AGREEING = 1
DRAINING = 2
REDUCING = 3
LEAVING = 4


class TreePort:
    """Sends a rank's messages along the control tree: over MPI, or in a test."""

    def send_failure(self, dimension, rank):
        """This rank has failed."""
        raise NotImplementedError

    def send_activation(self, dimension, version, ops):
        """A version has been started, after so many operations."""
        raise NotImplementedError

    def send_free(self, dimension, ops):
        """Versions after so many operations are free."""
        raise NotImplementedError

    def send_fin(self, dimension):
        """Nothing more follows."""
        raise NotImplementedError


class AllRanksProtocol:
    """The state of one rank: told of events by its methods, it says in attributes what to do.

    While `stage` is AGREEING the driver gathers ``(operation, version)`` from every rank; while
    it is REDUCING it averages over all ranks, but for LOAD, in which each rank replaces its own
    vectors, and MEET, in which nothing moves. Where a bit of `due_on()` is set and that dimension
    of the control tree can carry another message, it calls `send_on`, which sends one by the port.

    Attributes:
        version: the one that the application's next call takes part in, of those that there are;
            ranks agree on it in every operation.
        base: what to add to that for the number that users see.
        calls: how many calls the application has completed: those that an exception ended are
            missing, and a rank that has joined is taken through versions without calls.
        ops: synchronous operations completed.
        operation, stage: the synchronous operation that this rank is in, and how far it has come.
        joined: whether the application has no more steps to make, and this rank takes part in
            the others' operations until all have joined (JOIN, and FINISH for the end of it).
        broken: whether an operation did not agree, after which only CLOSE may follow.
        failed: the first rank of whose failure this one has heard; −1 where there is none.
        fin_at: the version before which all ranks leave, once all are closing; else −1.
    """

    def __init__(self, dimensions):
        self.dimensions = dimensions
        self.port = None
        self.version = 0
        self.base = 0
        self.calls = 0
        self.ops = 0
        self.operation = NONE
        self.stage = OUTSIDE
        self.joined = False
        self.broken = False
        self.failed = -1
        self.fin_at = -1
        self.notice_due = 0
        self.noticed = 0
        self.fin_due = 0
        self.fin_seen = 0

    def attach(self, port):
        """Send by this `TreePort`."""
        self.port = port

    # What is due on the control tree

    def due_on(self):
        """On which dimensions something is due: a bit of each."""
        return self.notice_due | self.fin_due

    def send_on(self, dimension):
        """Send the first of what is due on a dimension; a FIN is the last."""
        if self.notice_due >> dimension & 1:
            self.notice_due &= ~(1 << dimension)
            self.port.send_failure(dimension, self.failed)
        else:
            self.fin_due &= ~(1 << dimension)
            self.port.send_fin(dimension)

    # What subclasses do besides the operations

    def run(self):
        """An operation has come further: do what can be done now."""

    def is_drained(self):
        """Whether what comes before this rank's next operation has been done."""
        return True

    def expect(self, version):
        """Everything before this version is to be done before the operation."""

    def hold(self):
        """The operation begins to move data."""

    def release(self):
        """The operation is over."""

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

    def completed(self):
        """The application has completed a call."""
        self.calls += 1

    # Operations

    def enter(self, operation):
        """The application enters a synchronous operation: gather (operation, version) from all."""
        if operation == JOIN:
            self.joined = True
        self.operation = operation
        self.stage = AGREEING
        self.run()

    def agreed(self, records, size, differ=False):
        """Every rank has entered an operation; `records` holds each one's (operation, version).

        Operations also `differ` where ranks load different versions.

        If all are the same it begins. Ranks that have joined take part in any average of the
        others, unless they had made more calls, and once all have joined, all finish. If all close,
        what anybody has started is carried out, FIN is sent, and nothing is forwarded any more.
        Otherwise ranks that are not closing are broken, and those that are close anew.
        """
        r: cython.int
        kind: cython.int
        common: cython.int = JOIN
        same: cython.bint = not differ
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
        averages: cython.bint = common != CLOSE and common != LOAD and common != MEET
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
            self.expect(last)
            self.run()
        elif common == JOIN:
            self.operation = FINISH
            self.drain(last)
        else:
            self.operation = common
            self.drain(at)

    def drain(self, version):
        """Do what comes before it, which a rank that has joined may have to, and begin."""
        self.version = version
        self.stage = DRAINING
        self.expect(version)
        self.run()
        self.settle()

    def settle(self):
        """Begin to move data once everything before has been done."""
        if self.stage == DRAINING and self.is_drained():
            self.stage = REDUCING
            self.hold()

    def reduced(self):
        """The average over all ranks is there, and the application has got it.

        A rank that has joined waits for the next operation.
        """
        if self.operation == FINISH:
            self.joined = False
        self.operation = JOIN if self.joined else NONE
        self.stage = AGREEING if self.joined else OUTSIDE
        self.ops += 1
        self.release()

    def load(self, number):
        """The application's next version has this number for users."""
        self.base = number - self.version

    # Closing

    def fin(self, dimension):
        """The neighbor on this dimension sends nothing any more."""
        self.fin_seen |= 1 << dimension

    def is_done(self):
        """Whether nothing is left to do before leaving."""
        return True

    def may_leave(self):
        """Whether everything started has been done and nothing is under way to this rank."""
        return (
            self.stage == LEAVING
            and self.is_done()
            and self.notice_due == 0
            and self.fin_due == 0
            and self.fin_seen == (1 << self.dimensions) - 1
        )
