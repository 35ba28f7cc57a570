from mpi4py.libmpi cimport MPI_Request

from collectives.engine.control_tree cimport ControlTree
from collectives.engine.ports cimport EnginePort
from collectives.engine.stalls cimport StallReporter
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.reduction cimport Reduction
from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport Layout
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.rank cimport RankProtocol

cdef enum:
    # Integers gathered from each rank: operation, version, the version to load or the purpose,
    # questions asked, the failed rank that it knows of (−1: none), and calls made.
    RECORD = 6

cdef class Operations(StallReporter):
    cdef readonly Layout layout
    cdef ControlTree tree
    cdef Exchange exchange
    cdef Reduction reduction
    cdef unsigned int polls
    cdef bint busy  # as the last poll left it
    # This rank's protocol, with what it contributes, and the port and the vectors by which it acts.
    cdef RankProtocol driven
    cdef ContributionProtocol contribution
    cdef EnginePort port
    cdef HostVectors vectors
    cdef Memory scratch_memory
    # Agreements; `counting`: all ranks leave, and gather how many questions they have asked.
    cdef MPI_Request gather
    cdef long long record[RECORD]
    cdef long long *records
    cdef long long *pairs
    cdef long long loading
    cdef bint counting

    cdef int _drive(self, RankProtocol driven, EnginePort port, ControlTree tree) except -1
    cdef void _advance(self) noexcept nogil
    cdef bint _is_busy(self) noexcept nogil
    cdef void _check(self, int rc) noexcept nogil
    cdef bint _all_sent(self) noexcept nogil
    cdef bint _all_answered(self) noexcept nogil
    cdef void _record(self, long long *record) noexcept nogil
    cdef void _gather(self) noexcept nogil
    cdef void _begin_gathering(self) noexcept nogil
    cdef void _look_at_gathered(self) noexcept nogil
    cdef void _agreed(self) noexcept nogil
    cdef void _enter_operation(self, int operation) noexcept nogil
