from collectives.memory.layout cimport Layout, UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.formed_groups cimport Group, GroupProtocol
from collectives.protocols.group_rank cimport GroupRankPort, GroupRankProtocol
from wagma.simulation.core cimport Method, Simulation
from wagma.simulation.values cimport Average

cdef enum:
    # Events: an application's vector has been staged in the engine's memory; a message has arrived;
    # a group has averaged; the time may be one that a protocol is to be told of. Those from
    # OPERATION are of operations of all ranks.
    STAGED
    CAME
    EXCHANGED
    PASSED
    OPERATION

cdef class GroupsMethod(Method):
    cdef list ports

    cdef void take_part(self, Group group)
    cdef void end_call(self, SimulatedGroupPort port)

cdef class SimulatedGroupPort(GroupRankPort):
    cdef Simulation simulation
    cdef readonly GroupProtocol protocol
    cdef readonly GroupRankProtocol deciding
    cdef readonly int rank
    cdef readonly object steps
    cdef readonly bint exchanged
    cdef readonly long long told_at
    # By source, oldest first: the messages in flight.
    cdef dict coming
    cdef HostVectors values
    cdef UserVector given
    cdef double total
    cdef bint pausing
    cdef readonly list met

    cdef int give(self, vector, int flags) except -1
    cdef void proceed(self)
    cdef void _send(self, int destination, object integers)
    cdef bint _under_way(self, Group group)
    cdef void contribute(self, Average average) noexcept nogil
    cdef void take(self, Average average) noexcept nogil
    cdef void _meet(self, Group group)
    cdef void _take_part(self)

cdef long long nanoseconds(double seconds) noexcept nogil
