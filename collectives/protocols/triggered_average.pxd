from collectives.protocols.all_ranks cimport AVERAGE, CLOSE, FINISH, JOIN, SYNC, AllRanksProtocol
from collectives.protocols.contribution cimport NOWHERE, SCRATCH, X, ContributionProtocol
from collectives.protocols.rank cimport RankProtocol

cdef class TriggeredAverageProtocol(AllRanksProtocol):
    cdef readonly long long made, started
    cdef long long sync_period
    cdef unsigned int due, sent

    cdef void activate(self, long long version, int dimension) noexcept nogil
    cdef bint averages(self) noexcept nogil
    cdef bint call(self) noexcept nogil

cdef class HeldContribution(ContributionProtocol):
    cdef void called(self) noexcept nogil
    cdef bint is_lending(self) noexcept nogil

cdef class TriggeredRankProtocol(RankProtocol):
    cdef TriggeredAverageProtocol triggering
    cdef HeldContribution held
    cdef readonly bint alone

    cdef void call(self) noexcept nogil
    cdef bint passes_by(self) noexcept nogil
