from collectives.memory.layout cimport Layout, UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.rank cimport RankProtocol
from collectives.protocols.rank_port cimport RankPort
from wagma.simulation.core cimport Simulation
from wagma.simulation.values cimport Average

cdef class Operations:
    cdef Simulation simulation
    cdef readonly Layout layout
    cdef Average average
    cdef bint sharing
    cdef double agreement_time, average_time
    cdef int agreed_kind, entered, joined
    cdef list ranks
    # Of each rank's last operation: how many calls the rank had made, and the number to load.
    cdef list calls, numbers
    cdef long long[:, ::1] records

    cdef bint happens(self, int kind, int rank)
    cdef void _agree(self)
    cdef void _join_average(self)

cdef class OperatingRank(RankPort):
    cdef Operations all
    cdef int rank
    cdef AllRanksProtocol operations
    cdef ContributionProtocol contribution
    cdef RankProtocol steps
    cdef HostVectors vectors
    cdef UserVector given
    cdef bint exchanged
    cdef double total
