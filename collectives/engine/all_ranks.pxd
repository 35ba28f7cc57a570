from collectives.engine.calls cimport Calls
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.shared cimport Shared

cdef class AllRanks(Calls):
    # The memory shared with other ranks of the node; why this rank has none that they can map.
    cdef Shared shared
    cdef readonly str not_shared
    # All shared memory, one object for each exchange.
    cdef list all_shared

    cdef int _share_memory(self, Exchange exchange, bint vectors, bint rings, groups=*) except -1
    cdef void _announce_leaving(self) noexcept nogil
    cdef int _leave_others(self) except -1 nogil
    cdef int _end_messages(self) except -1 nogil
    cdef void _free_requests(self) noexcept nogil
    cdef bint _has_started(self) noexcept nogil
    cdef int _leave(self) except -1 nogil
