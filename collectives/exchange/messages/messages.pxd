from collectives.exchange.messages.doubling cimport Doubling
from collectives.exchange.messages.slices cimport Slices
from collectives.exchange.reduction cimport Reduction
from collectives.exchange.transport cimport Transport

cdef class Messages(Transport):
    cdef Reduction reduction
    cdef Doubling doubling
    cdef Slices slices
    cdef bint sliced
    # Whether the arrays that are not averaged are still to be written.
    cdef bint others_left
    # The exchange begins once the application's vector has arrived from its device.
    cdef bint coming
    # The ticket of the passes that write these, or the mean of a single member.
    cdef long long written

    cdef void begin(self, bint sliced) noexcept nogil
    cdef void _begin_whole(self) noexcept nogil
    cdef void _write_others(self) noexcept nogil
