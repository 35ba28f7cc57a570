from mpi4py.libmpi cimport MPI_Request

from collectives.exchange.arrival cimport Arrival
from collectives.exchange.compression cimport Compression
from collectives.memory.layout cimport Layout
from collectives.memory.space cimport Space
from collectives.recording.recorder cimport Exchanged

cdef class Reduction:
    cdef Layout layout
    # None if vectors are sent in their own dtypes.
    cdef Compression compression
    # Layout of the data sent: `layout` itself unless it is compressed.
    cdef Layout wire
    cdef Space space
    cdef int tag, size, me, error
    # How many of the arrays, from the first on, are averaged, and where these end in `wire`.
    cdef int averaged
    cdef Py_ssize_t end
    cdef const int *members
    cdef char *source
    # The application's arrays. `lent`: they are averaged instead of the source, block by block;
    # `keeps`: they are copied to the source as well. `taken`: bytes of `wire` processed so far.
    cdef char **user
    cdef bint lent, keeps
    cdef Py_ssize_t taken
    cdef Arrival arrival
    # Whether other processes have mapped the engine's vectors on this device.
    cdef bint exported
    cdef char **target
    cdef char **copy
    cdef char **saved
    # The weight of this rank's vector, and of all that has been averaged; its count, and the mean of
    # the members' (see `protocols.job_count`).
    cdef double own_weight, weight, own_count, count
    # Whether this rank contributes a vector, of any weight, rather than zeros in place of one.
    cdef bint has_own
    # busy_ns: nanoseconds spent processing messages that had arrived.
    # in_place: averages that used the application's arrays where they are; in_slots: by slots.
    cdef long long bytes_sent, progress_count, busy_ns, in_place, in_slots
    # In the timeline: of which collective it is, and what it has processed last.
    cdef int number
    cdef Exchanged exchanged

    cdef void worked(self, long long began) noexcept nogil
    cdef bint have_arrived(self, MPI_Request *requests, int count) noexcept nogil
    cdef void remember(self, const char *vector) noexcept nogil
    cdef void _copy_target(self, char **to, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef void average_arrays(self, int count) noexcept nogil
    cdef void write_others(self) noexcept nogil
    cdef void write_source(self) noexcept nogil
    cdef char *outgoing(self, char *space, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef char *_sendable(self, char *space, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef bint has_user(self, Py_ssize_t end) noexcept nogil
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
        self, bint decodes, int i, Py_ssize_t first, Py_ssize_t count,
        const char *a, double share_a, const char *b, double share_b) noexcept nogil
