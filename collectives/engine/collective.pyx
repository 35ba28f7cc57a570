"""The driver's methods for Python: operations of all ranks, failures and closing."""

from cpython.buffer cimport PyBUF_WRITABLE
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.string cimport memcpy

from collectives.engine.agreement cimport MOST_TOLD, RECORD
from collectives.engine.calls cimport (
    CAUGHT_UP,
    LEFT,
    NO_VECTOR,
    OVER,
    SETTLED,
    Call,
)
from collectives.engine.deaths cimport revoke
from collectives.engine.driver cimport Driver
from collectives.engine.inquiry cimport ANSWER
from collectives.engine.waiting cimport wait_for
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_trylock,
    pthread_mutex_unlock,
)
from collectives.memory.handover cimport Handover
from collectives.protocols.all_ranks cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    SYNCHRONIZE,
)

from collectives.engine.words import PURPOSES


cdef class NativeCollective(Driver):
    """A driver with the methods that Python calls of every collective."""

    # What subclasses extend

    cdef void announce_leaving(self) noexcept nogil:
        """Announce to other ranks that the application makes no more calls."""

    cdef int leave_others(self) except -1 nogil:
        """Wait, before closing, for the exchanges this rank has begun; the lock is held."""
        return 0

    cdef int end_messages(self) except -1 nogil:
        """Wait, once all ranks leave, for the subclass's messages; the lock is held."""
        return 0

    cdef void free_requests(self) noexcept nogil:
        """Free this collective's MPI requests and datatypes; the MPI mutex is held."""
        self.tree.free()

    # Operations of all ranks

    def listen(self):
        """Begin to receive control messages, once all ranks have reached this point."""
        pthread_mutex_lock(&mpi_mutex)
        self.tree.listen()
        pthread_mutex_unlock(&mpi_mutex)

    def synchronize(self, vector, weight=None):
        """Average the vector in place over all ranks; all ranks continue from the average.

        The weight is that of the last call, unless one is given.
        """
        self.caller.carry_out(self, SYNCHRONIZE, vector, PyBUF_WRITABLE, weight)

    def average(self, vector, weight=None):
        """Overwrite the vector with the average over all ranks, and change nothing else.

        The weight is that of the last call, unless one is given.
        """
        self.caller.carry_out(self, AVERAGE, vector, PyBUF_WRITABLE, weight)

    def load(self, vector, long long version):
        """Continue from this vector, and make this version the next one."""
        self.caller.carry_out(self, LOAD, vector, 0, None, version)

    def meet(self):
        """Wait until all ranks call this; return a tuple of how many calls each had made then."""
        self.caller.carry_out(self, MEET, None, NO_VECTOR)
        return self.agreement.calls_made()

    def begin_collectively(self, str what):
        """Set the purpose, such as "join()", of the operations that all ranks enter; "": none."""
        self.stalls.purpose = PURPOSES[what] if what else NONE

    # What ranks tell each other with operations that they make anyway

    def tell_with_operations(self, int count):
        """From now on have every operation of all ranks gather so many numbers of each rank.

        All ranks call it, and meet there: none gathers more if one has failed before. Until `tell`
        the numbers are 0.
        """
        if not 0 < count <= MOST_TOLD:
            raise ValueError(f"count is {count}, not from 1 to {MOST_TOLD}")
        self.meet()
        with nogil:  # whoever has the lock may wait for the GIL
            pthread_mutex_lock(&self.lock)
        try:
            self.agreement.tell_with_operations(count)
        finally:
            pthread_mutex_unlock(&self.lock)

    def tell(self, const double[::1] numbers not None):
        """Tell these numbers with the next operation of all ranks; return whether it will.

        It never waits: while the engine is at work, or an operation is beginning, the numbers told
        before are kept.
        """
        cdef int count = self.agreement.width - RECORD
        cdef bint begins
        if numbers.shape[0] != count:
            raise ValueError(f"{numbers.shape[0]} numbers are told, not {count}")
        if pthread_mutex_trylock(&self.lock) != 0:
            return False
        begins = self.protocol.stage == AGREEING or self.agreement.counting
        if not begins:
            memcpy(&self.agreement.record[<int>RECORD], &numbers[0], count * sizeof(double))
        pthread_mutex_unlock(&self.lock)
        return not begins

    def told(self, long long known):
        """Return what all ranks have told with the last operation, unless it is known.

        Args:
            known: the number of operations after which it was returned last, at first 0.

        Returns:
            Their number, and the float64 numbers of rank 0, 1, …, as bytes; None if it is `known`,
            or the engine is at work, for which it does not wait.
        """
        cdef int count = self.agreement.width - RECORD
        if self.agreement.tellings == known or pthread_mutex_trylock(&self.lock) != 0:
            return None
        try:
            return self.agreement.tellings, PyBytes_FromStringAndSize(
                <char *>self.agreement.told, count * self.size * sizeof(double))
        finally:
            pthread_mutex_unlock(&self.lock)

    # Vectors on devices

    def wait_for(self, Handover handover):
        """Wait until a vector has arrived from its device; this rank is passive meanwhile."""
        with nogil:
            wait_for(self, handover)
        handover.check()

    def prepare_to_fetch(self, Handover handover):
        """Raise if no call can be made; wait until no earlier call uses the handover.

        Such a call was started but not waited for, or was interrupted by an exception.
        """
        self.check_usable()
        self.caller.complete(self)
        with nogil:
            self.waiter.wait_until(self, CAUGHT_UP)
            wait_for(self, handover)

    # Leaving

    def is_closing(self, int rank):
        """Return whether a rank has answered that it closes, and ask all again; call it often."""
        cdef bint closing
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.progress()
            closing = (self.stalls.inquiry.answered[rank]
                       and self.stalls.inquiry.answers[rank * ANSWER + 2] == CLOSE)
            pthread_mutex_unlock(&self.lock)
            self.stalls.ask(self)
        return closing

    def needs_others(self):
        """Return whether this rank could not leave if another one's process ended now."""
        cdef bint needs
        with nogil:
            pthread_mutex_lock(&self.lock)
            needs = not (self.closed or self.has_left())
            pthread_mutex_unlock(&self.lock)
        return needs

    cdef bint has_left(self) noexcept nogil:
        """Return whether all ranks close, and this one waits for nothing more of theirs."""
        return self.reached(LEFT)

    def begin_close(self):
        """Tell the other ranks that this one closes, if that needs no waiting."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            if self.protocol.stage == OUTSIDE and not (self.closed or self.caller.has_started()):
                self.announce_leaving()
                self.enter_operation(CLOSE)
            pthread_mutex_unlock(&self.lock)

    def close(self):
        """Complete what any rank has started, and leave; collective."""
        cdef long long waiting = self.waiter.waiting_ns
        if self.closed:
            return
        self.enter_call()
        self.stalls.closing = True
        try:
            if self.protocol.operation != CLOSE and self.caller.has_started():
                # The started call is completed first.
                with nogil:
                    self.waiter.wait_until(self, SETTLED)
                self.caller.settle(self, self.caller.pending)
            with nogil:
                self._leave()
        finally:
            # The statistics count only the time spent in calls.
            self.waiter.waiting_ns = waiting
            self.caller.guard.taken = False
        self.closed = True
        self.caller.last_vector = None
        pthread_mutex_lock(&mpi_mutex)
        self.free_requests()
        pthread_mutex_unlock(&mpi_mutex)
        if self.error != 0 and not self.said_error:
            raise self.engine_error()

    def abandon(self):
        """Leave alone, after the end of another rank's process; a started call has failed.

        Nothing that this rank has begun is completed, and no other rank may use its memory.
        """
        cdef Call call = self.caller.pending
        self.check_owner()
        if self.closed:
            return
        if call is not None:
            call.error = self.engine_error()
            with nogil:
                self.caller._abandon(self)
            self.caller._forget(call)
        with nogil:
            pthread_mutex_lock(&self.lock)
            if not self.bereft and revoke != NULL:
                self.mourn()  # another operation than this collective's has failed
            self.closed = True
            pthread_mutex_unlock(&self.lock)
        self.caller.last_vector = None
        pthread_mutex_lock(&mpi_mutex)
        self.free_requests()
        pthread_mutex_unlock(&mpi_mutex)

    cdef int _leave(self) except -1 nogil:
        """Enter CLOSE, once no interrupted operation is pending, and wait for its end."""
        pthread_mutex_lock(&self.lock)
        try:
            if self.protocol.operation != CLOSE:
                self.waiter.wait(self, OVER)
                self.leave_others()
                self.enter_operation(CLOSE)
            self.waiter.wait(self, LEFT)
            self.end_messages()
        finally:
            pthread_mutex_unlock(&self.lock)
        return 0

    # What it reports

    def statistics(self):
        """Return the counts and times (in seconds) of `statistics.Statistics`, in its order."""
        cdef long long waiting_ns = self.waiter.waiting_ns
        self.check_owner()
        versions, passive, staleness = self.counts()
        return (
            self.protocol.calls,
            self.steps.timely,
            self.steps.synchronizations,
            versions,
            passive,
            staleness,
            self.contribution.nonfinite,
            self.reduction.bytes_sent,
            self.reduction.in_place,
            self.reduction.in_slots,
            waiting_ns * 1e-9,
            (self.caller.calls_ns - waiting_ns) * 1e-9,
            self.busy_ns() * 1e-9,
        )

    @property
    def nonfinite(self):
        """The field of `statistics` with that name, without what the others cost."""
        return self.contribution.nonfinite

    @property
    def version(self):
        """The version of the next call."""
        return self.protocol.version + self.protocol.base

    @property
    def synchronizations(self):
        """The number of averages over all ranks from which the ranks continue."""
        return self.steps.synchronizations

    @property
    def failure(self):
        """The failed rank that this one knows of, and the error to raise; (−1, None): none."""
        return self.protocol.failed, self.failure_error() if self.protocol.failed >= 0 else None

    @property
    def broken(self):
        """Whether only close() is allowed."""
        return self.protocol.broken or self.protocol.failed >= 0

    @property
    def cannot_leave(self):
        """Whether an error of this rank's engine prevents it from closing with the others."""
        return self.error != 0 and self.is_broken(LEFT)
