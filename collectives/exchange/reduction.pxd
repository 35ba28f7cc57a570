from mpi4py.libmpi cimport MPI_Request

from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport Layout
from collectives.memory.handover cimport Handover
from collectives.memory.space cimport Space

cdef class Reduction:
    cdef Layout layout
    # Layout of the data sent: `layout` itself unless it is compressed.
    cdef Layout wire
    cdef bint compressed, decodes
    cdef Space space
    cdef bint *coded
    # A vector equal on all ranks; compressed vectors are sent as differences from it.
    cdef char *reference
    cdef Memory reference_memory
    cdef int tag, size, me, error
    cdef const int *members
    cdef char *source
    # The application's arrays. `given`: they are averaged instead of the source, block by block;
    # `keeps`: they are copied to the source as well. `taken`: bytes of `wire` processed so far.
    cdef char **user
    cdef bint given, keeps
    cdef Py_ssize_t taken
    # The application's arrays if they belong to a handover, else NULL: they may still be arriving
    # from a device, and return to it block by block. `more`: they are averaged once more first.
    cdef bint more
    cdef Handover handover
    # Whether other processes have mapped the engine's vectors on this device.
    cdef bint exported
    cdef char **staged
    cdef char **target
    cdef char **copy
    cdef char **saved
    # The weight of this rank's vector, and of all that has been averaged.
    cdef double own_weight, weight
    # busy_ns: nanoseconds spent processing messages that had arrived.
    cdef long long bytes_sent, progress_count, busy_ns

    cdef bint have_arrived(self, MPI_Request *requests, int count) noexcept nogil
    cdef void remember(self, const char *vector) noexcept nogil
    cdef void _copy_target(self, char **to, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef void write_source(self) noexcept nogil
    cdef char *outgoing(self, char *space, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef char *_sendable(self, char *space, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef bint has(self, char **arrays, Py_ssize_t end) noexcept nogil
    cdef bint has_user(self, Py_ssize_t end) noexcept nogil
    cdef void give_back(self, char **arrays, Py_ssize_t end) noexcept nogil
    cdef void give_back_user(self, Py_ssize_t end) noexcept nogil
    cdef Py_ssize_t _end_in_layout(self, Py_ssize_t end) noexcept nogil
    cdef void adopt(self, bint whole) noexcept nogil
    cdef char *contiguous(self, char **arrays, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef char *incoming(self, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef void finish(self, Py_ssize_t low, Py_ssize_t high, char *mean) noexcept nogil
    cdef void write(
        self, Py_ssize_t low, Py_ssize_t high,
        const char *a, double share_a, const char *b, double share_b) noexcept nogil
    cdef void _write_array(
        self, int i, Py_ssize_t first, Py_ssize_t count,
        const char *a, double share_a, const char *b, double share_b) noexcept nogil
