cdef int KEPT, PATIENCE
cdef long long UNKNOWN, NEVER, LEAST, least

cdef class Paces:
    cdef long long[::1] times, added, medians, sorted

    cdef void add(self, int rank, long long time) noexcept nogil
    cdef long long usual(self, int rank) noexcept nogil
    cdef long long patience(self, int rank, long long otherwise) noexcept nogil
