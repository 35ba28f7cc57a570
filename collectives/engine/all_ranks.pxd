from collectives.engine.calls cimport Calls

cdef class AllRanks(Calls):
    cdef void _announce_leaving(self) noexcept nogil
    cdef int _leave_others(self) except -1 nogil
    cdef int _end_messages(self) except -1 nogil
    cdef void _free_requests(self) noexcept nogil
    cdef int _leave(self) except -1 nogil
