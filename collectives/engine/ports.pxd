from collectives.engine.rhythm cimport Rhythm
from collectives.exchange.arrival cimport Arrival
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.mutex cimport pthread_mutex_t
from collectives.exchange.reduction cimport Reduction
from collectives.memory.space cimport Space
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.groups cimport Groups
from collectives.protocols.rank_port cimport RankPort
from collectives.protocols.snapshots cimport SnapshotProtocol

cdef enum:
    # The largest staleness, in versions, that is counted; larger ones are counted as this.
    MOST_STALENESS = 1000

cdef class EnginePort(RankPort):
    cdef Exchange exchange
    cdef Reduction reduction
    # The application's arrays on a device.
    cdef Arrival arrival
    cdef Space space
    cdef HostVectors vectors
    cdef ContributionProtocol contribution
    cdef AllRanksProtocol operations
    cdef int rank, size
    cdef int *everyone
    # The arrays that are averaged over all ranks through the ring; else NULL.
    cdef char **in_ring
    # The collective's lock; whether a thread reads or writes vectors without it, and since when.
    cdef pthread_mutex_t *lock
    cdef bint copying
    cdef long long copying_ns, copy_began
    # For the timeline: the collective's number, the operation that is under way, how many came
    # before, when it was entered (0: none is), when the version that runs began (0: none does), and
    # the bytes of vectors recorded as sent.
    cdef int number, operation
    cdef long long operation_number, operation_began, version_began, bytes_noted

    cdef void unlock_to_copy(self) noexcept nogil
    cdef void lock_after_copy(self) noexcept nogil
    cdef void lock_when_copied(self) noexcept nogil
    cdef void yield_lock(self) noexcept nogil
    cdef void entered(self) noexcept nogil
    cdef void note_bytes(self) noexcept nogil
    cdef bint begin_shared(self, long long number) noexcept nogil
    cdef void begin_in_ring(self, long long number, char **arrays) noexcept nogil
    cdef bint has_own(self) noexcept nogil
    cdef double own_count(self) noexcept nogil
    cdef void begin_by_messages(
        self, const int *members, int size, int me, int tag, bint keeps, int averaged
    ) noexcept nogil
    cdef int kept_in(self) noexcept nogil

cdef class VersionsPort(EnginePort):
    # The same object as `contribution`.
    cdef SnapshotProtocol publishing
    cdef Groups groups
    cdef int window
    cdef Rhythm rhythm
    # How many callers of the collective wait.
    cdef int *waiting_callers
    # Whether another rank had begun the exchange in which the vectors were closed.
    cdef bint kept
    # The group whose mean the last call returned.
    cdef int *members
    cdef int count
    # Statistics
    cdef long long executions, passive
    cdef long long staleness[MOST_STALENESS + 1]

    cdef void describe(self) noexcept nogil
    cdef bint awaits_device(self) noexcept nogil
