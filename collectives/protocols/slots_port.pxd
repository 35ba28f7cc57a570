cdef class SlotsPort:
    cdef bint has_vector(self) noexcept nogil
    cdef void fill(self, int slot) noexcept nogil
    cdef void average(self, int slot, const int *members, int size) noexcept nogil
    cdef void progressed(self) noexcept nogil
