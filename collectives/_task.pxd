from collectives._kernels cimport Codec
from collectives._vectors cimport Layout

cdef class Task:
    cdef Layout layout
    # What travels: `layout` itself unless it is compressed.
    cdef Layout wire
    cdef bint compressed, decodes
    cdef Codec *codecs
    cdef bint *coded
    # What all ranks have in common, which compressed vectors are told from.
    cdef char *reference
    cdef int tag, size, me, error
    cdef const int *members
    cdef char *source
    cdef char **target
    cdef char **copy
    cdef char **saved
    cdef double weight
    # busy_ns: nanoseconds spent on messages that had come.
    cdef long long bytes_sent, moves, busy_ns

    cdef void remember(self, const char *vector) noexcept nogil
    cdef void write_source(self) noexcept nogil
    cdef void encode(self, char *to, Py_ssize_t low, Py_ssize_t high) noexcept nogil
    cdef void write(
        self, Py_ssize_t low, Py_ssize_t high,
        const char *a, double share_a, const char *b, double share_b) noexcept nogil
    cdef void _write_array(
        self, int i, Py_ssize_t first, Py_ssize_t count,
        const char *a, double share_a, const char *b, double share_b) noexcept nogil
