from collectives.engine.group_queue cimport GroupQueue
from collectives.engine.ports cimport EnginePort
from collectives.engine.rhythm cimport Rhythm
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.reduction cimport Reduction
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.group_rank cimport GroupRankProtocol

cdef class GroupsPort(GroupQueue):
    cdef Exchange exchange
    cdef Reduction reduction
    cdef HostVectors vectors
    cdef GroupRankProtocol deciding
    # The port of operations of all ranks, with the collective's lock.
    cdef EnginePort port
    cdef Rhythm rhythm
    # For each rank, the sum of 1/|S| over the groups S with both it and this one.
    cdef double *met
    # When the average that is under way began, for the timeline.
    cdef long long began

    cdef void let_go(self) noexcept
