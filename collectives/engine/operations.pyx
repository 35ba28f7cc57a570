# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Operations that all ranks enter: agreement on the operation, and averages over all ranks.

Each collective has a lock, held while its state advances. One mutex serializes all MPI calls and is
held for nothing else. No MPI call blocks.
"""

from libc.stdlib cimport free
from mpi4py.libmpi cimport (
    MPI_ERR_NO_MEM,
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_SUCCESS,
    MPI_Iallgather,
    MPI_Test,
)
from mpi4py.MPI cimport Comm

from collectives.engine.control_tree cimport ControlTree
from collectives.engine.inquiry cimport Inquiry
from collectives.engine.ports cimport EnginePort
from collectives.engine.stalls cimport StallReporter
from collectives.engine.waiting cimport SECOND
from collectives.exchange.doubling cimport PHASES
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.allocation cimport zeroed
from collectives.memory.layout cimport Layout
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport AGREEING, CLOSE, LEAVING, LOAD, NONE
from collectives.protocols.contribution cimport SCRATCH
from collectives.protocols.rank cimport RankProtocol

cdef enum:
    # Bytes of a vector from which on its average takes so long that a caller yields often.
    LONG = 524288
    # Polls between two looks for questions while work is in flight: they are rare and not urgent.
    POLLS_TO_ANSWER = 16

# The largest limit on waiting, in seconds: 64-bit counts of nanoseconds end after 292 years.
cdef double LONGEST_LIMIT = 9e9


cdef class Operations(StallReporter):
    """One rank's part in operations of all ranks.

    Args:
        control, data: communicators that only this collective uses.
        like: list of arrays with the dtypes and lengths of those averaged; `single`: whether users
            pass one array rather than a list.
        identity: identifies this collective, the same on all ranks.
        oversubscribed: whether ranks and their progress threads outnumber the cores.
        stall, abort: seconds without progress after which a caller reports the missing ranks, or
            ends the job; 0: never.
        make_space: see `Layout`.
        by_messages: see `Exchange`.
    """

    def __init__(self, Comm control, Comm data, like, *, identity, bint single,
                 bint oversubscribed, double stall, double abort, wire_dtype=None,
                 make_space=None, bint by_messages=True):
        self.identity = identity
        self.control = control
        self.data = data
        self.rank = control.Get_rank()
        self.size = control.Get_size()
        self.oversubscribed = oversubscribed
        self.stall = <long long>(min(stall, LONGEST_LIMIT) * SECOND)
        self.abort = <long long>(min(abort, LONGEST_LIMIT) * SECOND)
        self.layout = Layout(
            [array.dtype.name for array in like], [array.size for array in like], single,
            make_space)
        self.yields_often = oversubscribed and self.layout.size >= LONG
        self.exchange = Exchange(data, self.layout, wire_dtype, by_messages)
        self.reduction = self.exchange.reduction
        self.gather = MPI_REQUEST_NULL
        self.records = <long long *>zeroed((RECORD + 2) * self.size, sizeof(long long))
        if self.records == NULL:
            raise MemoryError
        self.pairs = self.records + RECORD * self.size
        self.vectors = HostVectors(self.layout)
        self.scratch_memory = self.layout.space.allocate(self.layout.size)
        self.vectors.place(SCRATCH, self.scratch_memory.address)

    cdef int _drive(self, RankProtocol driven, EnginePort port, ControlTree tree) except -1:
        """Drive this rank by this port, and send control messages along this tree."""
        self.driven = driven
        self.protocol, self.contribution = driven.ranks, driven.contribution
        self.port, self.tree = port, tree
        port.lock = &self.lock
        driven.attach(port)
        self.inquiry = Inquiry(self.data, port.first_tag + 2 * PHASES)
        return 0

    def __dealloc__(self):
        free(self.records)

    # What subclasses extend

    cdef void _advance(self) noexcept nogil:
        """Do everything that can be done without waiting; messages have been received already."""
        cdef int steps
        if not self.port.copying:
            steps = self.driven.advance()
            self.reduction.progress_count += steps  # which exchanges have increased meanwhile
        if self.driven.gathers:
            self._gather()

    cdef bint _is_busy(self) noexcept nogil:
        """Return whether work is in flight."""
        return self.driven.is_busy()

    # Progress: the thread that holds the lock advances the collective's state

    cdef bint progress(self) noexcept nogil:
        if self.layout.space.deferred:
            self.layout.space.attach()
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self.tree.receive()
            self.tree.send_due()
            self.polls += 1
            if not self.busy or self.polls % POLLS_TO_ANSWER == 0:
                self._answer()
            if self.counting or self.protocol.stage == AGREEING and not self.driven.gathers:
                self._look_at_gathered()
            pthread_mutex_unlock(&mpi_mutex)
            if self.tree.error != 0:
                self.error = self.tree.error
        elif self.protocol.stage == AGREEING:
            self._record(self.records)
            self._agreed()
        self._advance()
        if self.reduction.error != 0:
            self.error = self.reduction.error
        if self.error != 0 and self.protocol.failed < 0:
            self.tree.fail(
                self.rank, b"no memory is left for messages or vectors"
                if self.error == MPI_ERR_NO_MEM else b"an MPI function has failed")
        self.busy = self._is_busy()
        return self.busy

    cdef long long progressed(self) noexcept nogil:
        return self.reduction.progress_count

    cdef long long _busy_ns(self) noexcept nogil:
        return self.reduction.busy_ns + self.port.copying_ns

    cdef void _check(self, int rc) noexcept nogil:
        if rc != MPI_SUCCESS:
            self.error = rc

    cdef bint _all_sent(self) noexcept nogil:
        cdef bint all
        pthread_mutex_lock(&mpi_mutex)
        all = self.tree.all_sent()
        pthread_mutex_unlock(&mpi_mutex)
        return all

    cdef bint _all_answered(self) noexcept nogil:
        """Return whether every question, of this rank and to it, has been answered."""
        cdef long long asked = 0
        cdef int rank
        if self.counting:
            return False
        for rank in range(self.size):
            if rank != self.rank:
                asked += self.records[RECORD * rank + 3]
        return self.inquiry.received == asked and self.inquiry.quiet()

    # Agreements

    cdef void _record(self, long long *record) noexcept nogil:
        record[0] = self.protocol.operation
        record[1] = self.protocol.version
        record[2] = self.purpose if self.protocol.operation != CLOSE else NONE
        if self.protocol.operation == LOAD:
            record[2] = self.loading
        record[3] = self.inquiry.asked
        record[4] = self.protocol.failed
        record[5] = self._calls_made()

    cdef void _gather(self) noexcept nogil:
        """Begin to gather which operation every rank is in, since that is due."""
        self.driven.gathers = False
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._begin_gathering()
            pthread_mutex_unlock(&mpi_mutex)

    cdef void _begin_gathering(self) noexcept nogil:
        """The MPI mutex is held."""
        self._record(self.record)
        self._check(MPI_Iallgather(self.record, RECORD, MPI_LONG_LONG, self.records, RECORD,
                                   MPI_LONG_LONG, self.control.ob_mpi, &self.gather))

    cdef void _look_at_gathered(self) noexcept nogil:
        """Agree if every rank has entered an operation; the MPI mutex is held.

        Once all leave, it is gathered how many questions each has asked, and none asks any more.
        """
        cdef int done
        self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        if not done:
            return
        if self.counting:
            self.counting = False
            return
        self.reduction.progress_count += 1
        self._agreed()
        if self.protocol.stage == LEAVING:
            self.counting = True
            self._begin_gathering()
        self.tree.send_due()

    cdef void _agreed(self) noexcept nogil:
        cdef bint same = True
        cdef bint failed = False
        cdef int rank
        for rank in range(self.size):
            failed = failed or self.records[RECORD * rank + 4] >= 0
            self.pairs[2 * rank] = self.records[RECORD * rank]
            self.pairs[2 * rank + 1] = self.records[RECORD * rank + 1]
            same = same and self.records[RECORD * rank + 2] == self.records[2]
        # Different versions to load are different operations, and so are different purposes.
        self.driven.agreed(self.pairs, self.size, self.records[2], not same, failed)

    cdef void _enter_operation(self, int operation) noexcept nogil:
        self.driven.enter(operation)
        self._gather()
