cdef class Transport:
    cdef bint progress(self) noexcept nogil
    cdef void adopt(self, char **kept) noexcept nogil
    cdef void divert(self) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef bint uses(self, char **user) noexcept nogil
