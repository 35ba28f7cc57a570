cimport cython

from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport Layout
from collectives.memory.space cimport Space

@cython.final
cdef class Compression:
    cdef Layout layout, wire
    cdef Space space
    # Which arrays are sent in the narrower dtype.
    cdef bint *narrowed
    # A vector equal on all ranks.
    cdef Memory reference

    cdef void remember(self, const char *vector) noexcept nogil
    cdef void encode(
        self, int i, Py_ssize_t first, Py_ssize_t count, char *to, const char *source
    ) noexcept nogil
    cdef void decode(
        self, int i, Py_ssize_t first, Py_ssize_t count, char *to, const char *source
    ) noexcept nogil
    cdef Py_ssize_t end_in_layout(self, Py_ssize_t end) noexcept nogil
