from collectives.engine.mailbox cimport Mailbox
from collectives.engine.protocol_calls cimport ProtocolCalls

cdef class PeerExchange(ProtocolCalls):
    cdef readonly Mailbox mailbox
    # Messages are under way.
    cdef bint carries

    cdef void _catch_up_with_messages(self) noexcept nogil
