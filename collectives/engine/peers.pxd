from collectives.engine.mailbox cimport Mailbox
from collectives.engine.protocol_calls cimport ProtocolCalls
from collectives.memory.handover cimport Handover
from collectives.protocols.peer_rank cimport PeerRankProtocol
from collectives.protocols.peers cimport PeerProtocol

cdef class PeerExchange(ProtocolCalls):
    # The port of what decides, and that.
    cdef readonly Mailbox mailbox
    cdef PeerRankProtocol deciding
    cdef readonly PeerProtocol exchanging
    # The mailbox has work in flight.
    cdef bint carries

    cdef void _serve_mailbox(self) noexcept nogil
    cdef void _catch_up_with_messages(self) noexcept nogil
    cdef int _call_with(self, vector, Handover handover) except -1
