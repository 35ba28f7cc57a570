from collectives.memory.layout cimport Layout
from collectives.protocols.contribution cimport Vectors

cdef class HostVectors(Vectors):
    cdef Layout layout
    # Whether X is finite, where a device has seen to that: 1 or 0; else UNKNOWN.
    cdef int finite
    # Of each of the rank's vectors, NULL where it has none: the addresses of its arrays.
    cdef char **of[4]
    # The arrays of those that are in one piece of memory each.
    cdef char **located
    # The answer of a device to whether X, or its change, is finite, when it was asked for that.
    cdef int *change_finite
    cdef bint asked
    cdef long long answered

    cdef void place(self, int vector, char *memory) noexcept nogil
    cdef char **arrays(self, int vector) noexcept nogil
    cdef bint knows_finite(self, char **x) noexcept nogil
    cdef bint knows_change(self) noexcept nogil
