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
from collectives.engine.stalls cimport StallReporter
from collectives.engine.waiting cimport SECOND
from collectives.exchange.clock cimport now
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
from collectives.protocols.all_ranks cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    FINISH,
    LEAVING,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    REDUCING,
    AllRanksProtocol,
)
from collectives.protocols.contribution cimport SCRATCH, X, ContributionProtocol

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
        cdef int rank
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
        self.everyone = <int *>zeroed(self.size, sizeof(int))
        if self.records == NULL or self.everyone == NULL:
            raise MemoryError
        for rank in range(self.size):
            self.everyone[rank] = rank
        self.pairs = self.records + RECORD * self.size
        self.vectors = HostVectors(self.layout)
        self.scratch_memory = self.layout.space.allocate(self.layout.size)
        self.scratch = self.scratch_memory.address
        self.vectors.place(SCRATCH, self.scratch)

    cdef int _begin_protocol(self, AllRanksProtocol protocol, ControlTree tree,
                             ContributionProtocol contribution) except -1:
        """Set the protocols, and reserve tags after those of their versions."""
        self.protocol = protocol
        self.contribution = contribution
        self.tree = tree
        self.sync_tag = tree.window * PHASES
        self.inquiry = Inquiry(self.data, self.sync_tag + 2 * PHASES)
        return 0

    def __dealloc__(self):
        free(self.records)
        free(self.everyone)

    # What subclasses extend

    cdef void _advance(self) noexcept nogil:
        """Do everything that can be done without waiting; messages have been received already."""
        while self._step():
            pass

    cdef bint _is_busy(self) noexcept nogil:
        """Return whether work is in flight."""
        return self.begun or self.protocol.stage == AGREEING

    cdef bint _step(self) noexcept nogil:
        """Advance the running operation by one step; return whether it advanced."""
        if not self._serve_operation():
            return False
        self.reduction.progress_count += 1
        return True

    cdef void _before_operation(self) noexcept nogil:
        """Prepare for an operation that the application enters."""

    cdef void _publish_average(self) noexcept nogil:
        """Deliver a complete average over all ranks; count it if it is a synchronization."""
        if self.protocol.operation != AVERAGE:
            self.synchronizations += 1

    cdef void _renumber(self) noexcept nogil:
        """Adjust the numbering of exchanges after an operation that has moved data."""

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
            if self.protocol.stage == AGREEING:
                self._agree()
            elif self.counting:
                self._count_questions()
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
        return self.reduction.busy_ns + self.copying_ns

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

    cdef void _contribute(self) noexcept nogil:
        """Begin to gather which operation every rank is in; the MPI mutex is held."""
        self._record(self.record)
        self._check(MPI_Iallgather(self.record, RECORD, MPI_LONG_LONG, self.records, RECORD,
                                   MPI_LONG_LONG, self.control.ob_mpi, &self.gather))

    cdef void _agree(self) noexcept nogil:
        """Agree if every rank has entered an operation; the MPI mutex is held."""
        cdef int done
        self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        if done:
            self.reduction.progress_count += 1
            self._agreed()
            if self.protocol.stage == AGREEING:
                self._contribute()
            elif self.protocol.stage == LEAVING:
                self.counting = True
                self._contribute()
            self.tree.send_due()

    cdef void _count_questions(self) noexcept nogil:
        """Learn how many questions each rank has asked; leaving ranks ask no more."""
        cdef int done
        self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        self.counting = not done

    cdef void _agreed(self) noexcept nogil:
        cdef int operation = self.protocol.operation
        cdef bint same = True
        cdef bint failed = False
        cdef int rank
        for rank in range(self.size):
            failed = failed or self.records[RECORD * rank + 4] >= 0
            self.pairs[2 * rank] = self.records[RECORD * rank]
            self.pairs[2 * rank + 1] = self.records[RECORD * rank + 1]
            same = same and self.records[RECORD * rank + 2] == self.records[2]
        # Different versions to load are different operations, and so are different purposes.
        self.protocol.agreed(self.pairs, self.size, not same)
        if self.protocol.stage == OUTSIDE:
            self.disagreed = operation
            # A failure that made other ranks close will reach this rank too, and says why.
            self.done = not failed

    cdef void _begin_operation(self, int operation) noexcept nogil:
        self.done = False
        self._before_operation()
        if operation != CLOSE:  # which keeps the version of a started call, for its result
            self.taken_version = self.protocol.version
        self.protocol.enter(operation)
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)

    # Averages over all ranks

    cdef bint _serve_operation(self) noexcept nogil:
        """Advance the operation of all ranks by one step; return whether it advanced."""
        if self.copying or self.protocol.stage != REDUCING:
            return False
        if self.protocol.operation == LOAD:
            self._load()
        elif self.protocol.operation == MEET:
            self._end_operation()
        elif not self.begun:
            if not self._may_give():
                return False
            self._begin_reducing()
        elif self.exchange.progress():
            self._finish_reducing()
        else:
            return False
        return True

    cdef bint _is_here(self) noexcept nogil:
        """Return whether the application's whole vector has arrived, if it is on a device."""
        return self.reduction.staged == NULL or self.reduction.handover.arrived()

    cdef bint _may_give(self) noexcept nogil:
        """Return whether the contribution can use the vector now, without waiting for a device."""
        if not self.contribution.takes_pass():
            return True
        return self._is_here() and (
            not self.contribution.adds_change() or self.vectors.knows_change())

    cdef void _begin_reducing(self) noexcept nogil:
        """Begin an average over all ranks, with this rank's contribution."""
        self._unlock_to_copy()
        self.contribution.begin_average()
        self._lock_after_copy()
        self._reduce()

    cdef void _reduce(self) noexcept nogil:
        """Begin the exchange of an average over all ranks."""
        self.begun = True
        self._begin_exchange(self.everyone, self.size, self.rank, self._tag(), False)

    cdef void _begin_exchange(
        self, const int *members, int size, int me, int tag, bint keeps
    ) noexcept nogil:
        """Begin an exchange by messages, of the vectors that `contribution` selects."""
        self.exchange.begin(
            members, size, me, tag, self.contribution.weight, self._source(),
            self.vectors.of[X], self.contribution.lent, keeps,
            self.vectors.arrays(self.contribution.target),
            self.vectors.arrays(self.contribution.copy),
            self.vectors.arrays(self.contribution.saved))

    cdef char *_source(self) noexcept nogil:
        """Return the vector that is averaged, unless the application's is averaged in its place."""
        return self.scratch

    cdef int _tag(self) noexcept nogil:
        """Return the tag of this operation's exchange."""
        return self.sync_tag + <int>(self.protocol.ops % 2) * PHASES

    cdef void _reduce_again(self) noexcept nogil:
        """Repeat an average whose total weight is 0, with equal weights of all finite vectors."""
        self.data_ops += 1
        self._renumber()
        self.contribution.begin_again()
        self._reduce()

    cdef void _finish_reducing(self) noexcept nogil:
        self.begun = False
        self.contribution.end_exchange(self.reduction.weight)
        if self.contribution.total == 0 and not self.contribution.weightless:
            self._reduce_again()
            return
        self._publish_average()
        self._end_operation()

    cdef void _end_operation(self) noexcept nogil:
        """End the operation of all ranks; a rank that has joined enters the next one."""
        cdef bint averages = self.protocol.operation == AVERAGE
        self.taken_count = 0
        self.taken_weight = 0 if self.contribution.weightless else self.contribution.total
        self.protocol.reduced()
        self.contribution.end_operation(averages)
        self.data_ops += 1
        self._renumber()
        if self.protocol.stage != AGREEING:
            self.done = True
        elif self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)

    cdef void _load(self) noexcept nogil:
        """Continue from the version that all ranks agreed on, whatever this rank requested."""
        self.protocol.load(self.records[2])
        self._end_operation()

    cdef void _unlock_to_copy(self) noexcept nogil:
        """Release the lock while this thread reads or writes long vectors.

        Other threads drive the collective meanwhile. The application holds the vectors, so nothing
        else reads or writes them.
        """
        self.copying = True
        self.copy_began = now()
        pthread_mutex_unlock(&self.lock)

    cdef void _lock_after_copy(self) noexcept nogil:
        self.copying_ns += now() - self.copy_began
        pthread_mutex_lock(&self.lock)
        self.copying = False
