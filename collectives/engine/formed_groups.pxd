from collectives.engine.group_port cimport GroupsPort
from collectives.engine.protocol_calls cimport ProtocolCalls
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.reduction cimport Reduction
from collectives.memory.handover cimport Handover
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.group_rank cimport GroupRankProtocol

cdef class FormedGroups(ProtocolCalls):
    # What the rank does next in groups, and what moves its vectors there.
    cdef GroupRankProtocol deciding
    cdef readonly GroupsPort queue
    cdef Exchange group_exchange
    cdef Reduction group_reduction
    cdef HostVectors group_vectors

    cdef int _call_with(self, vector, Handover handover) except -1
