from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives.engine.inquiry cimport Inquiry
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.rank cimport RankProtocol

cdef enum:
    # Integers gathered from each rank: operation, version, the version to load or the purpose,
    # questions asked, the failed rank that it knows of (−1: none), and calls made.
    RECORD = 6

cdef class Agreement:
    cdef MPI_Comm comm
    cdef int rank, size, error
    cdef RankProtocol steps
    cdef AllRanksProtocol protocol
    cdef Inquiry inquiry
    # `counting`: all ranks leave, and gather how many questions they have asked.
    cdef bint counting
    # The version that this rank loads.
    cdef long long loading
    cdef MPI_Request request
    cdef long long record[RECORD]
    cdef long long *records
    cdef long long *pairs

    cdef void _record(self, long long *record, int purpose, long long calls) noexcept nogil
    cdef void begin(self, int purpose, long long calls) noexcept nogil
    cdef bint look(self, int purpose, long long calls) noexcept nogil
    cdef void agree_alone(self, int purpose, long long calls) noexcept nogil
    cdef void _agreed(self) noexcept nogil
    cdef bint is_over(self) noexcept nogil
    cdef calls_made(self)
    cdef difference(self)
