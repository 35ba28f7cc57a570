cimport cython

@cython.final
cdef class JobCount:
    cdef readonly double unpublished, count, known, told

    cdef void work(self, double amount) noexcept nogil
    cdef void publish(self, bint counts) noexcept nogil
    cdef void average(self, double mean) noexcept nogil
    cdef void learn(self, double mean) noexcept nogil
    cdef void tell(self) noexcept nogil
    cdef void restart(self, double count) noexcept nogil
