from collectives.engine.driver cimport Driver

cdef class NativeCollective(Driver):
    cdef void announce_leaving(self) noexcept nogil
    cdef int leave_others(self) except -1 nogil
    cdef int end_messages(self) except -1 nogil
    cdef void free_requests(self) noexcept nogil
    cdef bint has_left(self) noexcept nogil
    cdef int _leave(self) except -1 nogil
