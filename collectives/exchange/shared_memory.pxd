from collectives.memory.allocation cimport Memory, Segment
from collectives.memory.layout cimport Layout

cdef struct Part:
    # What its rank weighs, and will after an exchange; the weight of all members of the last one.
    double weight, weight_after, total
    # Whether the mean replaces the snapshot rather than the result vector, what was in the snapshot
    # is then to be in the result vector, and a mean has replaced it since; or whether both what is
    # averaged and the mean are in its ring, and neither vector is touched; whether it gets the mean.
    bint in_place, saves, replaced, ringed, takes

cdef class SharedMemory:
    cdef Layout layout
    cdef int rank
    cdef Py_ssize_t begin_of_ring
    # By rank, NULL on other nodes.
    cdef Part **parts
    cdef unsigned long long **words
    cdef char **vectors
    # This rank's, and those of others.
    cdef Segment segment
    cdef Memory exported
    cdef list segments, mapped

    cdef _place(self, int rank, Segment segment, char *vectors)
    cdef char *snapshot(self, int rank) noexcept nogil
    cdef char *result(self, int rank) noexcept nogil
    cdef char *ring(self, int rank) noexcept nogil
