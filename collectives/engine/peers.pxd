from collectives.engine.mailbox cimport Mailbox
from collectives.engine.protocol_calls cimport ProtocolCalls
from collectives.memory.handover cimport Handover

cdef class PeerExchange(ProtocolCalls):
    cdef readonly Mailbox mailbox
    # The mailbox has work in flight.
    cdef bint carries
    # The call that awaited its vector has begun.
    cdef bint took

    cdef void _catch_up_with_messages(self) noexcept nogil
    cdef int _is_change_finite(self) noexcept nogil
    cdef int _call_with(self, vector, Handover handover) except -1
