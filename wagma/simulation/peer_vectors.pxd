from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport Layout, UserVector

cdef class PeerVectors:
    cdef Layout layout
    cdef Memory model_memory, change_memory, earlier_memory
    # The model, and that of earlier of a method that looks ahead; what the application last got, and from its call on its change of that; a received
    # vector.
    cdef char **model
    cdef char **earlier
    cdef char **change
    cdef char **received
    # The application's vector.
    cdef UserVector user

    cdef int give(self, vector) except -1
    cdef Memory copy_of(self, bint changes)
    cdef void combine(
        self, char **to, char **x, double share_x, char **m, double share_m) noexcept nogil
    cdef void scale(self, char **to, char **source, double factor) noexcept nogil
    cdef void mix(self, Memory vector, double keep, double share)
    cdef Memory halve(self, Memory vector)
    cdef void look_ahead(self, double momentum)
    cdef void record(self, bint against_model) noexcept nogil
    cdef bint is_change_finite(self, bint against_model) noexcept nogil
    cdef void return_model(self, double factor, bint present) noexcept nogil
    cdef void read_model(self, double factor) noexcept nogil
