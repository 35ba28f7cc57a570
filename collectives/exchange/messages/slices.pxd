from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives.exchange.reduction cimport Reduction
from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport Layout
from collectives.protocols.slicing cimport Slicing

cdef enum:
    # Blocks in flight: the messages of one are pending while another is averaged.
    DEPTH = 2
    # What a block waits for: the application's vector to arrive from a device; passes that write
    # what this member sends; messages with the others' slices; passes that average this member's
    # own slice; messages with the others' means.
    COMING
    SOURCE
    PARTS
    AVERAGING
    MEANS

cdef struct Block:
    # Its number, past the last if none is left, and what it waits for.
    Py_ssize_t number
    int stage
    long long ticket
    MPI_Request *requests
    # What this member sends; the slices received; the block's mean. The engine's own space for the
    # first and the last, used where messages cannot read or write the vectors directly.
    char *outgoing
    char *parts
    char *mean
    char *outgoing_space
    char *mean_space
    # Whether `outgoing` or `mean` is in the application's buffer, which MPI uses then.
    bint lent

cdef class Slices:
    cdef MPI_Comm comm
    cdef Reduction reduction
    cdef Layout wire
    cdef Slicing slicing
    cdef Memory memory
    cdef Py_ssize_t room, left
    cdef Block blocks[DEPTH]
    cdef MPI_Request *requests
    # By member: its weight and its count.
    cdef double *weights
    cdef double *shares
    cdef const char **vectors
    cdef int pending
    cdef bint weighed
    # The device that holds `memory` has failed: MPI is given the host memory `spare` instead.
    cdef bint failed
    cdef Memory spare
    # The ticket of the passes that wrote the block finished last.
    cdef long long finished

    cdef void begin(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void divert(self) noexcept nogil
    cdef bint uses(self) noexcept nogil
    cdef bint _step(self, int k) noexcept nogil
    cdef void _look_for_errors(self) noexcept nogil
    cdef void _weigh(self) noexcept nogil
    cdef void _begin_block(self, int k) noexcept nogil
    cdef void _take(self, Block *block, int k) noexcept nogil
    cdef bint _is_next(self, Block *block) noexcept nogil
    cdef void _exchange_parts(self, Block *block, int k) noexcept nogil
    cdef void _average(self, Block *block) noexcept nogil
    cdef void _exchange_means(self, Block *block, int k) noexcept nogil
    cdef bint _is_first(self, Block *block) noexcept nogil
    cdef bint _may_go_on(self, Block *block) noexcept nogil
    cdef Py_ssize_t _slice_of(
        self, Py_ssize_t number, int member, Py_ssize_t *begin) noexcept nogil
    cdef void _receive(
        self, char *to, Py_ssize_t count, int member, int tag,
        MPI_Request *request) noexcept nogil
    cdef void _send(
        self, const char *source, Py_ssize_t count, int member, int tag,
        MPI_Request *request) noexcept nogil
