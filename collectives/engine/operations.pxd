from mpi4py.libmpi cimport MPI_Request

from collectives.engine.control_tree cimport ControlTree
from collectives.engine.stalls cimport StallReporter
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.reduction cimport Reduction
from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport Layout
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.contribution cimport ContributionProtocol

cdef enum:
    # Integers gathered from each rank: operation, version, the version to load or the purpose,
    # questions asked, the failed rank that it knows of (−1: none), and calls made.
    RECORD = 6

cdef class Operations(StallReporter):
    cdef readonly Layout layout
    cdef ControlTree tree
    cdef Exchange exchange
    cdef Reduction reduction
    cdef int *everyone
    cdef int sync_tag
    cdef unsigned int polls
    cdef bint busy  # as the last poll left it
    # What this rank contributes, and its vectors; average() takes this rank's contribution from
    # `scratch` where it does not read the application's buffer.
    cdef ContributionProtocol contribution
    cdef HostVectors vectors
    cdef char *scratch
    cdef Memory scratch_memory
    # An exchange is pending, or complete and its mean not yet taken.
    cdef bint begun
    # The application's call is complete. A thread reads or writes vectors without the lock.
    cdef bint done, copying
    # Agreements; `counting`: all ranks leave, and gather how many questions they have asked.
    cdef MPI_Request gather
    cdef long long record[RECORD]
    cdef long long *records
    cdef long long *pairs
    cdef long long loading
    cdef bint counting
    cdef int disagreed
    # Number of operations that have moved data; a repeated average counts again.
    cdef long long data_ops
    # Of the last call's result: the mean's weight, the version, the group's size (0: all ranks).
    cdef double taken_weight
    cdef long long taken_version
    cdef int taken_count
    # Statistics
    cdef readonly long long timely, synchronizations
    cdef long long copying_ns, copy_began

    cdef int _begin_protocol(self, AllRanksProtocol protocol, ControlTree tree,
                             ContributionProtocol contribution) except -1
    cdef void _advance(self) noexcept nogil
    cdef bint _is_busy(self) noexcept nogil
    cdef bint _step(self) noexcept nogil
    cdef void _before_operation(self) noexcept nogil
    cdef void _publish_average(self) noexcept nogil
    cdef void _renumber(self) noexcept nogil
    cdef void _check(self, int rc) noexcept nogil
    cdef bint _all_sent(self) noexcept nogil
    cdef bint _all_answered(self) noexcept nogil
    cdef void _record(self, long long *record) noexcept nogil
    cdef void _contribute(self) noexcept nogil
    cdef void _agree(self) noexcept nogil
    cdef void _count_questions(self) noexcept nogil
    cdef void _agreed(self) noexcept nogil
    cdef void _begin_operation(self, int operation) noexcept nogil
    cdef bint _serve_operation(self) noexcept nogil
    cdef bint _is_here(self) noexcept nogil
    cdef bint _may_give(self) noexcept nogil
    cdef void _begin_reducing(self) noexcept nogil
    cdef void _reduce(self) noexcept nogil
    cdef void _begin_exchange(
        self, const int *members, int size, int me, int tag, bint keeps) noexcept nogil
    cdef int _tag(self) noexcept nogil
    cdef char *_source(self) noexcept nogil
    cdef void _reduce_again(self) noexcept nogil
    cdef void _finish_reducing(self) noexcept nogil
    cdef void _end_operation(self) noexcept nogil
    cdef void _load(self) noexcept nogil
    cdef void _unlock_to_copy(self) noexcept nogil
    cdef void _lock_after_copy(self) noexcept nogil
