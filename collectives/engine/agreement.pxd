from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives.engine.inquiry cimport Inquiry
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.rank cimport RankProtocol

cdef enum:
    # Integers gathered from each rank: operation, version, the version to load or the purpose,
    # questions asked, the failed rank that it knows of (−1: none), and calls made.
    RECORD = 6
    # Numbers that the application tells all ranks with each operation, at most.
    MOST_TOLD = 16

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
    # Integers gathered from each rank: `RECORD`, and as many as the application tells.
    cdef int width
    cdef long long record[RECORD + MOST_TOLD]
    cdef long long *records
    cdef long long *pairs
    # What every rank has told with the last operation, and the number of operations with which
    # ranks have told anything.
    cdef double *told
    cdef readonly long long tellings

    cdef void _record(self, long long *record, int purpose, long long calls) noexcept nogil
    cdef void begin(self, int purpose, long long calls) noexcept nogil
    cdef bint look(self, int purpose, long long calls) noexcept nogil
    cdef void agree_alone(self, int purpose, long long calls) noexcept nogil
    cdef void _agreed(self) noexcept nogil
    cdef bint is_over(self) noexcept nogil
    cdef int tell_with_operations(self, int count) except -1
    cdef calls_made(self)
    cdef difference(self)
