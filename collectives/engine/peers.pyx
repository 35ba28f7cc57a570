# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Exchanges between peers: calls in which ranks send each other vectors, beside what all do."""

from cpython.buffer cimport PyBUF_WRITABLE
from mpi4py.MPI cimport Comm

from collectives.engine.all_ranks cimport AllRanks
from collectives.engine.calls cimport CALL, DONE, OTHER_GOALS, OTHER_WISHES, PUBLISH
from collectives.engine.control_tree cimport ControlTree
from collectives.engine.mailbox cimport Mailbox
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport (
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.layout cimport UserVector
from collectives.protocols.all_ranks cimport JOIN, AllRanksProtocol
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.peers cimport PeerProtocol

from collectives.errors import ClosedError, DisagreementError
from collectives.topology import activation_peers

cdef enum:
    # The application's call is over; nothing is under way that this rank has begun, in close() and
    # before; all that was noted is done; and sent as well; all messages have come.
    ANSWERED = OTHER_GOALS
    QUIET
    PAUSED
    CARRIED_OUT
    IDLE
    EMPTY

cdef enum:
    # What the application wants, beside CALL, PUBLISH and JOIN.
    PAUSE = OTHER_WISHES
    RESUME
    CATCH_UP
    SETTLE
    HAND_IN


cdef class PeerExchange(AllRanks):
    """One rank of a method whose calls are those of a mailbox's protocol.

    Args:
        control, data, like, others: see `AllRanks`.
    """

    def __init__(self, Comm control, Comm data, like, **others):
        cdef AllRanksProtocol protocol
        AllRanks.__init__(self, control, data, like, **others)
        protocol = AllRanksProtocol(len(activation_peers(self.rank, self.size)))
        self._begin_protocol(protocol, ControlTree(control, protocol, 1),
                             ContributionProtocol(self.vectors, protocol))

    def attach(self, Mailbox mailbox):
        """Serve this mailbox, whose protocol begins."""
        # Nothing serves this collective yet, so the lock is not needed.
        mailbox.begin()
        self.mailbox = mailbox

    # Progress

    cdef void _advance(self) noexcept nogil:
        cdef long long progress_count = self.mailbox.progress_count
        cdef long long moved = self.mailbox.messages.moved
        AllRanks._advance(self)
        self.carries = self.mailbox.progress()
        if self.mailbox.progress_count != progress_count:
            self.rhythm.beat(now())
            moved -= 1
        self.reduction.progress_count += self.mailbox.messages.moved != moved
        if self.mailbox.error() != 0:
            self.error = self.mailbox.error()

    cdef bint _is_busy(self) noexcept nogil:
        return AllRanks._is_busy(self) or self.carries or not self.mailbox.has_answered()

    # What callers wait for, and say of it

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == ANSWERED:
            return self.mailbox.has_answered()
        if goal == QUIET:
            return self.mailbox.protocol.is_quiet()
        if goal == PAUSED:
            return self.mailbox.protocol.is_quiet() and self.mailbox.is_idle()
        if goal == CARRIED_OUT:
            return self.mailbox.vectors.first == NULL
        if goal == IDLE:
            return self.mailbox.is_idle()
        if goal == EMPTY:
            return self.mailbox.is_over()
        return AllRanks._reached(self, goal)

    cdef bint _is_calls(self, int goal) noexcept nogil:
        return goal in (ANSWERED, PAUSED, CARRIED_OUT, IDLE) or AllRanks._is_calls(self, goal)

    cdef bint _misses(self, int goal) noexcept nogil:
        """Also in others' calls, after join()."""
        return ((goal == ANSWERED or goal == DONE and self.purpose == JOIN)
                and self.mailbox.protocol.missing >= 0)

    cdef _missing(self):
        """All are told of it, but where that rank has closed: they will see that themselves, as
        this one leaves too. In join() it could not, for what it is in is everybody's.
        """
        cdef PeerProtocol protocol = self.mailbox.protocol
        text = (f"rank {self.rank} waits in call {protocol.calls} for rank {protocol.missing}, "
                "which ")
        if protocol.left[protocol.index_of(protocol.missing)]:
            error = ClosedError(f"{text}has closed: all ranks make the same calls")
            if self.purpose != JOIN:
                return error
        else:
            error = DisagreementError(
                f"{text}is in average(), synchronize() or load(): all ranks enter these after the "
                "same number of calls, and while none has joined"
            )
        self.fail(f"{type(error).__name__}: {error}")
        return error

    cdef long long _calls_made(self) noexcept nogil:
        return self.mailbox.protocol.calls

    cdef void _describe_call(self, long long *answer) noexcept nogil:
        AllRanks._describe_call(self, answer)
        answer[3] = not self.mailbox.has_answered()

    def _waits_in_call(self):
        awaited = [
            rank for rank in range(self.size)
            if self.mailbox.protocol.waits_for(rank) or self.mailbox.messages.waits_for(rank)
        ]
        return "close()" if self.closing else f"call {self._calls_made()}", awaited

    # Leaving

    cdef void _announce_leaving(self) noexcept nogil:
        self.mailbox.protocol.leave()

    cdef int _leave_others(self) except -1 nogil:
        if not self.mailbox.protocol.leaving:
            self.mailbox.protocol.leave()
        self._wait(QUIET)
        return 0

    cdef int _end_messages(self) except -1 nogil:
        if not self.mailbox.messages.ending:
            self.mailbox.end()
        self._wait(EMPTY)
        return 0

    cdef void _free_requests(self) noexcept nogil:
        AllRanks._free_requests(self)
        self.mailbox.messages.free_type()

    # What Python calls

    def check(self, vector):
        """Raise, and tell all ranks, where this vector cannot be averaged here or now."""
        if self.no_progress_thread:
            with nogil:
                self._catch_up_with_messages()
        self._check_usable()
        try:
            UserVector(vector, self.layout, PyBUF_WRITABLE)
        except (TypeError, ValueError) as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    cdef void _catch_up_with_messages(self) noexcept nogil:
        """Without a progress thread, take in what has come: a call need not wait for any of it."""
        cdef long long progress_count = -1
        pthread_mutex_lock(&self.lock)
        while self.reduction.progress_count != progress_count:
            progress_count = self.reduction.progress_count
            self.progress()
        pthread_mutex_unlock(&self.lock)

    def call_peers(self, vector):
        """Make the next call of the mailbox's protocol, in place."""
        self._use_mailbox(CALL, vector)

    def publish_change(self, vector):
        """Publish what the application has changed; it goes on from this vector."""
        self._use_mailbox(PUBLISH, vector)

    def hand_in(self, vector):
        """Give what the application has changed since its last call, outside of any call."""
        self._use_mailbox(HAND_IN, vector)

    def settle(self):
        """Carry a call that an exception interrupted on to its end."""
        self._use_mailbox(SETTLE)

    def go_on_from(self, vector):
        """Note that the application has this vector, which is what it got but for rounding."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.mailbox.go_on_from(opened.arrays)
            pthread_mutex_unlock(&self.lock)

    def pause(self, bint paused):
        """Begin nothing new between ranks, and wait for what this one has begun; or go on."""
        self._use_mailbox(PAUSE if paused else RESUME)

    def join_peers(self, vector):
        """Make no more calls, but those that others need, until all ranks do so."""
        self._use_mailbox(JOIN, vector)

    def catch_up(self, long long calls):
        """Make as many calls as the rank that has made the most, once all have joined."""
        self._use_mailbox(CATCH_UP, None, calls)

    cdef int _use_mailbox(self, int what, vector=None, long long calls=0) except -1:
        """Do what the application wants of the mailbox, and wait for it."""
        cdef UserVector opened = None
        cdef char **arrays = NULL
        cdef long long began = now()
        self._enter()
        try:
            if vector is not None:
                opened = UserVector(vector, self.mailbox.layout, PyBUF_WRITABLE)
                arrays = opened.arrays
            with nogil:
                pthread_mutex_lock(&self.lock)
                try:
                    if arrays != NULL or what == SETTLE:
                        # A call that an exception interrupted is carried on to its end first.
                        self._wait(ANSWERED)
                    self._do_with_mailbox(what, arrays, calls)
                finally:
                    self.mailbox.forget_user()
                    self.calls_ns += now() - began
                    pthread_mutex_unlock(&self.lock)
                self._serve_others()
        finally:
            self.guard.taken = False
        return 0

    cdef int _do_with_mailbox(self, int what, char **arrays, long long calls) except -1 nogil:
        if what == CALL:
            self.mailbox.begin_call(arrays)
            self._wait(ANSWERED)
            self.protocol.completed()
            self.timely += 1
        elif what == PUBLISH:
            self.mailbox.publish_change(arrays)
            self._wait(ANSWERED)
        elif what == HAND_IN:
            self.mailbox.record_change(arrays)
            self.mailbox.protocol.hand_in()
            self._wait(ANSWERED)
        elif what == PAUSE:
            self.mailbox.protocol.pause()
            self._wait(PAUSED)
        elif what == RESUME:
            self.mailbox.protocol.resume()
        elif what == JOIN:
            self.mailbox.record_change(arrays)
            self.mailbox.protocol.join()
            if not self.mailbox.protocol.follows:
                self._wait(ANSWERED)
        elif what == CATCH_UP:
            self.mailbox.protocol.catch_up(calls)
            self._wait(ANSWERED)
            # What no call of the others has taken along.
            self.mailbox.publish(1)
            self._wait(IDLE)
        return 0

    def read_model(self, vector):
        """Overwrite the vector by the model, as calls return it."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, PyBUF_WRITABLE)
        with nogil:
            pthread_mutex_lock(&self.lock)
            try:
                self._wait(CARRIED_OUT)
                self.mailbox.read_model(opened.arrays)
            finally:
                pthread_mutex_unlock(&self.lock)

    def restart(self, vector, long long calls):
        """Go on from this vector after so many calls, as all ranks do at the same time."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            try:
                self._wait(IDLE)
                self.mailbox.restart(opened.arrays, calls)
            finally:
                pthread_mutex_unlock(&self.lock)
