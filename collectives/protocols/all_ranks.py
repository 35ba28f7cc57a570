"""Operations of all ranks, as one of them sees them: agreement, averages, failures and closing.

A synchronous operation first agrees on the operation of all ranks; data moves only after that.
Subclasses define what ranks do outside these operations; it must be complete before one begins.

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
SAVE = 9

# The stages of a synchronous operation.
OUTSIDE = 0
AGREEING = 1
DRAINING = 2
REDUCING = 3
LEAVING = 4


class TreePort:
    """Sends a rank's messages along the control tree: over MPI, or in a test."""

    def send_failure(self, dimension, rank):
        """Tell a neighbor that a rank has failed."""
        raise NotImplementedError

    def send_activation(self, dimension, version, ops):
        """Tell a neighbor that a version has been started, after `ops` operations."""
        raise NotImplementedError

    def send_free(self, dimension, ops):
        """Tell a neighbor that any rank may start versions after `ops` operations."""
        raise NotImplementedError

    def send_fin(self, dimension):
        """Tell a neighbor that no more messages follow."""
        raise NotImplementedError


class AllRanksProtocol:
    """The state of one rank: events call its methods; its attributes tell the driver what to do.

    While `stage` is AGREEING the driver gathers ``(operation, version)`` from every rank; while
    it is REDUCING it averages over all ranks, except in LOAD, in which each rank replaces its own
    vectors, SAVE, in which it saves its snapshot, and MEET, in which no data moves. For each bit of
    `due_on()`, once that dimension of the control tree can carry another message, it calls
    `send_on`, which sends one by the port.

    Attributes:
        version: the version of the application's next call, if there are versions; ranks agree
            on it in every operation.
        base: the number of a version for users, minus the version.
        calls: how many calls the application has completed: calls that an exception ended are not
            counted, nor versions that a rank takes part in without a call after it has joined.
        ops: synchronous operations completed.
        operation, stage: the synchronous operation that this rank is in, and its stage.
        joined: whether the application makes no more calls, and this rank takes part in
            the others' operations until all have joined (JOIN, and FINISH for the end of it).
        broken: whether ranks have disagreed on an operation; then only CLOSE may follow.
        failed: the rank of whose failure this one heard first; −1: none.
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

    # Messages due on the control tree

    def due_on(self):
        """Return the dimensions on which a message is due, one bit for each."""
        return self.notice_due | self.fin_due

    def send_on(self, dimension):
        """Send the next message that is due on a dimension; a FIN is the last."""
        if self.notice_due >> dimension & 1:
            self.notice_due &= ~(1 << dimension)
            self.port.send_failure(dimension, self.failed)
        else:
            self.fin_due &= ~(1 << dimension)
            self.port.send_fin(dimension)

    # What subclasses do outside the operations

    def run(self):
        """Do what has become possible because an operation has reached its next stage."""

    def is_drained(self):
        """Return whether everything before this rank's next operation is complete."""
        return True

    def expect(self, version):
        """Require everything before this version to be executed before the operation."""

    def hold(self):
        """Note that the operation begins to move data."""

    def release(self):
        """Note that the operation is complete."""

    def notice(self, rank, dimension):
        """Note a rank's failure, received on this dimension (−1: this rank's own), and forward it.

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
        """Note that the application has completed a call."""
        self.calls += 1

    # Operations

    def enter(self, operation):
        """Enter a synchronous operation: gather (operation, version) from all ranks."""
        if operation == JOIN:
            self.joined = True
        self.operation = operation
        self.stage = AGREEING
        self.run()

    def agreed(self, records, size, differ=False):
        """Handle the agreement; `records` holds each rank's (operation, version).

        Operations also `differ` if ranks load different versions, or have different purposes.

        If all are the same the operation begins. Ranks that have joined take part in any average of
        the others, unless they had made more calls; once all have joined, all finish. If all close,
        every version that has been started is executed, FIN is sent, and nothing is forwarded any
        more. Otherwise closing ranks enter CLOSE again, and the others are `broken`.
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
        averages: cython.bint = common not in (CLOSE, LOAD, MEET, SAVE)
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
        """Begin once everything before `version` is complete; a joined rank may be behind."""
        self.version = version
        self.stage = DRAINING
        self.expect(version)
        self.run()
        self.settle()

    def settle(self):
        """Begin to move data once everything before the operation is complete."""
        if self.stage == DRAINING and self.is_drained():
            self.stage = REDUCING
            self.hold()

    def reduced(self):
        """End the operation: its average is available, and the application has received it.

        A rank that has joined waits for the next operation.
        """
        if self.operation == FINISH:
            self.joined = False
        self.operation = JOIN if self.joined else NONE
        self.stage = AGREEING if self.joined else OUTSIDE
        self.ops += 1
        self.release()

    def load(self, number):
        """Give the application's next version this number for users."""
        self.base = number - self.version

    # Closing

    def fin(self, dimension):
        """Note that the neighbor on this dimension sends no more messages."""
        self.fin_seen |= 1 << dimension

    def is_done(self):
        """Return whether nothing is left to do before leaving."""
        return True

    def may_leave(self):
        """Return whether all that was started is complete, and no message is still to arrive."""
        return (
            self.stage == LEAVING
            and self.is_done()
            and self.notice_due == 0
            and self.fin_due == 0
            and self.fin_seen == (1 << self.dimensions) - 1
        )
