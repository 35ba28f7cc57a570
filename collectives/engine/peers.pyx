"""Exchanges between peers: calls in which ranks send vectors to each other."""

from cpython.buffer cimport PyBUF_WRITABLE

from collectives.engine.calls cimport CALL, DONE, PUBLISH, give_back_interrupted
from collectives.engine.mailbox cimport Mailbox
from collectives.engine.protocol_calls cimport (
    ANSWERED,
    DRAINED,
    FURTHER_GOALS,
    FURTHER_WISHES,
    PAUSE,
    PAUSED,
    QUIET,
    RESUME,
    ProtocolCalls,
)
from collectives.engine.waiting cimport give_up
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport (
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.handover cimport Handover
from collectives.memory.layout cimport UserVector
from collectives.protocols.all_ranks cimport JOIN, OUTSIDE
from collectives.protocols.peers cimport PeerProtocol

from collectives.agreement import name_ranks
from collectives.errors import ClosedError, CudaError, DisagreementError

cdef enum:
    # All recorded steps are executed; and all blocks are sent as well.
    CARRIED_OUT = FURTHER_GOALS
    IDLE

cdef enum:
    # What the application requests besides, and JOIN.
    CATCH_UP = FURTHER_WISHES
    HAND_IN
    AWAIT  # a call whose vector is arriving from a device


cdef class PeerExchange(ProtocolCalls):
    """One rank of a method in which ranks send each other vectors.

    Args:
        control, data, like, others: see `Driver`.
    """

    def attach(self, Mailbox mailbox):
        """Serve this mailbox, and begin the protocol that it acts for."""
        # Nothing serves this collective yet, so the lock is not needed.
        mailbox.number = self.number
        mailbox.begin()
        self.mailbox, self.messages = mailbox, mailbox.messages
        self.deciding, self.exchanging = mailbox.deciding, mailbox.deciding.exchanging

    cdef void let_go(self) noexcept:
        if self.deciding is not None:
            self.deciding.port = self.exchanging.port = None

    # Progress

    cdef void advance(self) noexcept nogil:
        ProtocolCalls.advance(self)
        self._serve_mailbox()

    cdef void _serve_mailbox(self) noexcept nogil:
        cdef long long progress_count = self.mailbox.progress_count
        cdef long long moved = self.mailbox.messages.moved
        self.carries = self.mailbox.progress()
        if self.mailbox.progress_count != progress_count:
            self.rhythm.beat(now())
            moved -= 1
        self.reduction.progress_count += self.mailbox.messages.moved != moved
        if self.mailbox.error() != 0:
            self.error = self.mailbox.error()

    cdef bint is_in_memory(self) noexcept nogil:
        # Operations of all ranks, failures, and vectors that arrive from a device need full polls.
        return (self.error == 0 and self.protocol.stage == OUTSIDE and not self.caller.awaits
                and not self.mailbox.messages.uses_mpi())

    cdef void progress_in_memory(self) noexcept nogil:
        self._serve_mailbox()

    cdef bint is_busy(self) noexcept nogil:
        return ProtocolCalls.is_busy(self) or self.carries or not self.deciding.has_answered()

    # What callers wait for, and how they report it

    cdef bint reached(self, int goal) noexcept nogil:
        if goal == ANSWERED:
            return (not self.caller.awaits and self.deciding.has_answered()
                    and self.mailbox.error() == 0)
        if goal == QUIET:
            # What a failed rank has left undone will not be done.
            return self.protocol.failed >= 0 or self.exchanging.is_quiet()
        if goal == PAUSED:
            return self.exchanging.is_quiet() and self.mailbox.is_idle()
        if goal == CARRIED_OUT:
            return self.mailbox.vectors.first == NULL
        if goal == IDLE:
            return self.mailbox.is_idle()
        if goal == DRAINED:
            return self.mailbox.is_over()
        return ProtocolCalls.reached(self, goal)

    cdef bint is_calls(self, int goal) noexcept nogil:
        return goal in (CARRIED_OUT, IDLE) or ProtocolCalls.is_calls(self, goal)

    cdef bint misses(self, int goal) noexcept nogil:
        """Return whether a call waits for a missing rank; after join() also one made for others."""
        return ((goal == ANSWERED or goal == DONE and self.stalls.purpose == JOIN)
                and self.exchanging.missing >= 0)

    cdef missing_error(self):
        """Return the error, and tell all ranks of it unless the missing rank has closed.

        The others learn of a closed rank themselves, as this rank leaves too. In join() it could
        not leave, since that is an operation of all ranks.
        """
        cdef PeerProtocol protocol = self.exchanging
        text = (f"rank {self.rank} waits in call {protocol.calls} for rank {protocol.missing}, "
                "which ")
        if protocol.left[protocol.index_of(protocol.missing)]:
            error = ClosedError(f"{text}has closed: all ranks make the same calls")
            if self.stalls.purpose != JOIN:
                return error
        else:
            error = DisagreementError(
                f"{text}is in average(), synchronize() or load(): all ranks enter these after the "
                "same number of calls, and while none has joined"
            )
        self.fail(f"{type(error).__name__}: {error}")
        return error

    cdef long long calls_made(self) noexcept nogil:
        return self.exchanging.calls

    def _waits_in_call(self):
        if self.caller.awaits:
            return f"call {self.calls_made()}, whose vector the device has not provided yet,", []
        awaited = [
            rank for rank in range(self.size)
            if self.exchanging.waits_for(rank) or self.mailbox.messages.waits_for(rank)
        ]
        needed = "; ".join(
            f"{what} of {name_ranks(ranks)}"
            for what, ranks in self.exchanging.needs().items() if ranks)
        where = f"call {self.calls_made()}" + (f" ({needed})" if needed else "")
        return "close()" if self.stalls.closing else where, awaited

    cdef void describe_call(self, long long *answer) noexcept nogil:
        ProtocolCalls.describe_call(self, answer)
        answer[3] = not self.deciding.has_answered()  # a call that awaits its vector has not begun

    # Leaving

    cdef void announce_leaving(self) noexcept nogil:
        if self.mailbox.messages.abandoned:
            self.exchanging.leaving = True
        elif not self.exchanging.leaving:
            self.exchanging.leave(self.protocol.failed >= 0)

    cdef void free_requests(self) noexcept nogil:
        ProtocolCalls.free_requests(self)
        self.mailbox.messages.free_type()

    # What Python calls

    def check(self, vector):
        """Raise, and tell all ranks, if this vector cannot be averaged here or now."""
        if self.no_progress_thread:
            with nogil:
                self._catch_up_with_messages()
        ProtocolCalls.check(self, vector)

    cdef void _catch_up_with_messages(self) noexcept nogil:
        """Receive what has arrived, which no thread does, so that a call need not wait for it."""
        cdef long long progress_count = -1
        pthread_mutex_lock(&self.lock)
        while self.reduction.progress_count != progress_count:
            progress_count = self.reduction.progress_count
            self.progress()
        pthread_mutex_unlock(&self.lock)

    def call_peers(self, vector, Handover handover=None):
        """Make the next call, in place.

        With a handover, whose vector has the model's layout, the call begins once the device has
        checked the vector. If an exception comes before that, the vector stays in the handover.
        """
        if handover is None:
            self._use_protocol(CALL, vector)
        else:
            self._call_with(vector, handover)

    cdef int _call_with(self, vector, Handover handover) except -1:
        """Make a call with a handover's vector, and give that back."""
        self.port.arrival.handover = self.mailbox.vectors.handover = handover
        self.deciding.await_vector()
        try:
            self._use_protocol(AWAIT, vector)
        except:
            if self.deciding.began:
                give_back_interrupted(handover)
            raise
        try:
            handover.check()
            handover.give_back(bounds=True)
        except CudaError as error:
            self.fail(f"CudaError: {error}")
            raise
        self.deciding.returned_checked()
        return 0

    def publish_change(self, vector):
        """Publish the application's change; the application continues from this vector."""
        self._use_protocol(PUBLISH, vector)

    def hand_in(self, vector):
        """Hand in the application's change since its last call, outside of any call."""
        self._use_protocol(HAND_IN, vector)

    def go_on_from(self, vector):
        """Note that the application holds this vector, which is what it got except for rounding."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            try:
                # An average with another rank may have begun to save what the application got.
                self.waiter.wait(self, ANSWERED)
                self.mailbox.user = opened.arrays
                self.deciding.go_on_from()
                self.mailbox.user = NULL
            finally:
                pthread_mutex_unlock(&self.lock)

    def join_peers(self, vector):
        """Make no more calls, except those that others need, until all ranks have joined."""
        self._use_protocol(JOIN, vector)

    def catch_up(self, long long calls):
        """Make as many calls as the rank that has made the most, once all have joined."""
        self._use_protocol(CATCH_UP, None, calls)

    cdef UserVector _open(self, vector):
        """Open a vector that `check` has accepted, in the layout of the mailbox's."""
        return UserVector(vector, self.mailbox.layout, PyBUF_WRITABLE)

    cdef void begin_awaited(self) noexcept nogil:
        if self.protocol.failed < 0 and self.mailbox.error() == 0:
            self.caller.awaits = not self.deciding.begin_awaited()

    cdef void _forget_user(self) noexcept nogil:
        """Have steps executed without the application's buffer, once its vector has arrived."""
        self.caller.awaits = False
        while (self.mailbox.vectors.arrives and self.deciding.began
                and not self.mailbox.is_here()):
            self.port.yield_lock()
        self.deciding.interrupt()
        self.mailbox.vectors.arrives = False

    cdef int _do(self, int what, char **arrays, long long calls) except -1 nogil:
        if self.mailbox.error() != 0:
            give_up(self, ANSWERED)
        self.mailbox.user = arrays
        if what == CALL or what == AWAIT:
            if what == CALL:
                self.deciding.call()
            else:
                self.mailbox.vectors.arrives = self.caller.awaits = True
            self.waiter.wait(self, ANSWERED)
            if what == CALL or self.deciding.began:
                self.protocol.completed()
                self.steps.timely += 1
        elif what == PUBLISH:
            self.deciding.publish_change()
            self.waiter.wait(self, ANSWERED)
        elif what == HAND_IN:
            self.deciding.hand_in()
            self.waiter.wait(self, ANSWERED)
        elif what == PAUSE:
            self.exchanging.pause()
            self.waiter.wait(self, PAUSED)
        elif what == RESUME:
            self.exchanging.resume()
        elif what == JOIN:
            if self.deciding.join():
                self.waiter.wait(self, ANSWERED)
        elif what == CATCH_UP:
            self.exchanging.catch_up(calls)
            self.waiter.wait(self, ANSWERED)
            self.deciding.caught_up()
            self.waiter.wait(self, IDLE)
        return 0

    def read_model(self, vector):
        """Overwrite the vector with the model, as calls return it."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, PyBUF_WRITABLE)
        with nogil:
            pthread_mutex_lock(&self.lock)
            try:
                self.waiter.wait(self, CARRIED_OUT)
                self.mailbox.read_model(opened.arrays)
            finally:
                pthread_mutex_unlock(&self.lock)

    def restart(self, vector, long long calls):
        """Continue from this vector with so many calls made, as all ranks do at the same time."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            try:
                self.waiter.wait(self, IDLE)
                self.mailbox.restart(opened.arrays, calls)
            finally:
                pthread_mutex_unlock(&self.lock)
