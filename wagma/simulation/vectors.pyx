"""The vectors of simulated ranks."""

from collectives.protocols.contribution cimport Vectors


cdef class NoVectors(Vectors):
    """A simulated rank's vectors, which have no values, and passes over which take no time."""

    cdef void copy(self, int to, int source) noexcept nogil:
        pass

    cdef void zero(self, int vector) noexcept nogil:
        pass

    cdef bint all_finite(self, int vector) noexcept nogil:
        return True

    cdef void add_change(self, int to) noexcept nogil:
        pass
