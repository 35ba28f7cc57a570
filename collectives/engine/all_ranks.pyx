# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Operations of all ranks, in every collective: agreement, averages, failures and closing."""

from cpython.buffer cimport PyBUF_WRITABLE

from collectives.engine.calls cimport LEFT, NO_VECTOR, OVER, SETTLED, Calls
from collectives.engine.operations cimport RECORD
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.exchange.shared cimport Shared
from collectives.protocols.all_ranks cimport (
    AVERAGE,
    CLOSE,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    SYNCHRONIZE,
)

from collectives.agreement import by_value, name_ranks
from collectives.engine.stalls import PURPOSES, operation_in_words
from collectives.errors import ClosedError, CudaError, DisagreementError


cdef class AllRanks(Calls):
    """One rank's part in operations of all ranks.

    A subclass creates `protocol` and `tree`, and implements the other calls.
    """

    def __cinit__(self, *_, **__):
        self.all_shared = []

    def listen(self):
        """Begin to receive control messages, once all ranks have reached this point."""
        pthread_mutex_lock(&mpi_mutex)
        self.tree.listen()
        pthread_mutex_unlock(&mpi_mutex)

    # Memory that the ranks of a node share

    cdef int _share_memory(
        self, Exchange exchange, bint vectors, bint rings, groups=None
    ) except -1:
        """Allocate memory for this rank's exchanges, if the system has any that others can map."""
        try:
            self.shared = exchange.shared = Shared(
                exchange.reduction, groups, self.rank, self.size, vectors, rings)
            self.all_shared.append(self.shared)
        except (AttributeError, OSError, CudaError) as error:  # memfd_create is Linux's
            self.not_shared = f"rank {self.rank} has no memory to share: {error}"
        return 0

    @property
    def handle(self):
        """The handles by which other ranks of the node map this one's memory."""
        cdef Shared shared
        return [shared.memory.handle for shared in self.all_shared]

    @property
    def shares(self):
        """Whether this rank and others of its node use each other's memory."""
        return self.shared is not None and self.shared.works

    def map(self, handles):
        """Map the memory of the node's ranks, given a dict from ranks to their handles.

        Raises:
            OSError, CudaError: the memory cannot be mapped.
        """
        cdef int i
        cdef Shared shared
        for i, shared in enumerate(self.all_shared):
            shared.map({rank: handle[i] for rank, handle in handles.items()})

    def share(self):
        """Exchange vectors from now on in the memory that all ranks of the node have mapped."""
        cdef Shared shared
        for shared in self.all_shared:
            shared.use()

    def unmap(self):
        """Unmap other ranks' memory on devices, once no rank uses this one's any more."""
        cdef Shared shared
        for shared in self.all_shared:
            shared.memory.unmap()

    # What subclasses extend

    cdef void _announce_leaving(self) noexcept nogil:
        """Announce to other ranks that the application makes no more calls."""

    cdef int _leave_others(self) except -1 nogil:
        """Wait, before closing, for the exchanges this rank has begun; the lock is held."""
        return 0

    cdef int _end_messages(self) except -1 nogil:
        """Wait, once all ranks leave, for the subclass's messages; the lock is held."""
        return 0

    cdef void _free_requests(self) noexcept nogil:
        """Free this collective's MPI requests and datatypes; the MPI mutex is held."""
        self.tree.free()

    # What Python calls

    def synchronize(self, vector, weight=None):
        """Average the vector in place over all ranks; all ranks continue from the average.

        Its weight is that of the last call, unless one is given.
        """
        self._carry_out(SYNCHRONIZE, vector, PyBUF_WRITABLE, weight)

    def average(self, vector, weight=None):
        """Overwrite the vector with the average over all ranks, and change nothing else.

        Its weight is that of the last call, unless one is given.
        """
        self._carry_out(AVERAGE, vector, PyBUF_WRITABLE, weight)

    def load(self, vector, long long version):
        """Continue from this vector, and make this version the next one."""
        self._carry_out(LOAD, vector, 0, None, version)

    def meet(self):
        """Wait until all ranks call this; return a tuple of how many calls each had made then."""
        cdef int rank
        self._carry_out(MEET, None, NO_VECTOR)
        return tuple([self.records[RECORD * rank + 5] for rank in range(self.size)])

    def begin_collectively(self, str what):
        """Set the purpose, such as "join()", of the operations that all ranks enter; "": none."""
        self.purpose = PURPOSES[what] if what else NONE

    def begin_close(self):
        """Tell the other ranks that this one closes, where that needs no waiting."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            if self.protocol.stage == OUTSIDE and not (self.closed or self._has_started()):
                self._announce_leaving()
                self._enter_operation(CLOSE)
            pthread_mutex_unlock(&self.lock)

    def close(self):
        """Complete what any rank has started, and leave; collective."""
        cdef long long waiting = self.waiting_ns
        if self.closed:
            return
        self._enter()
        self.closing = True
        try:
            if self.protocol.operation != CLOSE and self._has_started():
                # The started call is completed first.
                with nogil:
                    self._wait_until(SETTLED)
                self._settle(self.pending)
            with nogil:
                self._leave()
        finally:
            # The statistics' times are those of calls.
            self.waiting_ns = waiting
            self.guard.taken = False
        self.closed = True
        self.last_vector = None
        pthread_mutex_lock(&mpi_mutex)
        self._free_requests()
        pthread_mutex_unlock(&mpi_mutex)
        if self.error != 0 and not self.said_error:
            raise self._engine_error()

    @property
    def cannot_leave(self):
        """Whether an error of this rank's engine prevents it from closing with the others."""
        return self.error != 0 and self._is_broken(LEFT)

    cdef bint _has_started(self) noexcept nogil:
        """Return whether the application has started a call that is not complete."""
        return self.awaits or self.contribution.present

    cdef int _leave(self) except -1 nogil:
        """Enter CLOSE, once no interrupted operation is pending, and wait for its end."""
        pthread_mutex_lock(&self.lock)
        try:
            if self.protocol.operation != CLOSE:
                self._wait(OVER)
                self._leave_others()
                self._enter_operation(CLOSE)
            self._wait(LEFT)
            self._end_messages()
        finally:
            pthread_mutex_unlock(&self.lock)
        return 0

    def statistics(self):
        """Return the counts and times (in seconds) of `statistics.Statistics`, in its order."""
        self._check_owner()
        versions, passive, staleness = self._counts()
        return (
            self.protocol.calls,
            self.driven.timely,
            self.driven.synchronizations,
            versions,
            passive,
            staleness,
            self.contribution.nonfinite,
            self.reduction.bytes_sent,
            self.waiting_ns * 1e-9,
            (self.calls_ns - self.waiting_ns) * 1e-9,
            self._busy_ns() * 1e-9,
        )

    def _counts(self):
        """Return how many versions were executed, how many passively, and counts by staleness."""
        return 0, 0, ()

    def _disagreement(self):
        """Return the error of a rank whose operation differs from that of other ranks."""
        cdef int rank, i
        entered = by_value(
            tuple([self.records[RECORD * rank + i] for i in (0, 5, 2)]) for rank in range(self.size)
        )
        closing = any(kind == CLOSE for kind, _, _ in entered)
        (mine,) = (what for what, ranks in entered.items() if self.rank in ranks)
        del entered[mine]
        others = "; ".join(f"{name_ranks(ranks)} entered {operation_in_words(*what)}"
                           for what, ranks in sorted(entered.items()))
        return (ClosedError if closing else DisagreementError)(
            f"rank {self.rank} waits in {operation_in_words(*mine)}, "
            f"which needs all ranks to make the same calls, but {others}"
        )

    @property
    def version(self):
        """The version of the next call."""
        return self.protocol.version + self.protocol.base

    @property
    def synchronizations(self):
        """How many averages over all ranks have changed what ranks continue from."""
        return self.driven.synchronizations

    @property
    def failure(self):
        """The failed rank that this one knows of, and the error to raise; (−1, None): none."""
        return self.protocol.failed, self._failure() if self.protocol.failed >= 0 else None

    @property
    def broken(self):
        """Whether only close() is allowed."""
        return self.protocol.broken or self.protocol.failed >= 0
