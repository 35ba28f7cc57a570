from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives.exchange.reduction cimport Reduction
from collectives.memory.layout cimport Layout
from collectives.protocols.schedule cimport Schedule

cdef enum:
    # Most steps of one exchange: a fold, 31 of doubling, an unfold.
    PHASES = 34

cdef class Doubling:
    cdef MPI_Comm comm
    cdef Schedule schedule
    cdef Reduction reduction
    cdef Layout layout
    cdef MPI_Request requests[2]
    cdef bint summed
    # Two blocks: `partial`, averaged so far, and `incoming`, being received.
    cdef char *memory
    cdef char *partial
    cdef char *incoming
    cdef Py_ssize_t low, high, block
    # The two weights combined in each step, known from the first block on.
    cdef double ours[PHASES]
    cdef double theirs[PHASES]

    cdef void begin(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void _begin_block(self) noexcept nogil
    cdef char *_mean(self) noexcept nogil
    cdef void _post(self) noexcept nogil
    cdef void _receive(self) noexcept nogil
    cdef void _combine(self, double share_ours, double share_theirs) noexcept nogil
    cdef void _finish_block(
        self, const char *a, double share_a, const char *b, double share_b) noexcept nogil
