from collectives.protocols.all_ranks cimport AVERAGE, FINISH, SYNC
from collectives.protocols.contribution cimport (
    GIVEN,
    KEPT,
    NOWHERE,
    RESULT,
    SCRATCH,
    SNAPSHOT,
    ContributionProtocol,
    X,
)
from collectives.protocols.job_count cimport JobCount
from collectives.protocols.lease cimport Lease
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

cdef int UNFILLED, RETURNED, REPLACED, BASELESS

cdef class SnapshotProtocol

cdef class LateRule:
    cdef bint replaces(self, SnapshotProtocol snapshot) noexcept nogil
    cdef void publish(self, SnapshotProtocol snapshot) noexcept nogil
    cdef bint lacks_contribution(self, SnapshotProtocol snapshot, bint publishes) noexcept nogil
    cdef int stored_in(self) noexcept nogil
    cdef void begin_version(self, SnapshotProtocol snapshot, bint bypasses) noexcept nogil
    cdef void end_version(self, SnapshotProtocol snapshot) noexcept nogil
    cdef bint has_mean(self, SnapshotProtocol snapshot) noexcept nogil
    cdef void end_call(self, SnapshotProtocol snapshot) noexcept nogil
    cdef void join(self, SnapshotProtocol snapshot) noexcept nogil
    cdef void synchronized(self, SnapshotProtocol snapshot) noexcept nogil
    cdef bint publishes_changes(self) noexcept nogil

cdef class SnapshotProtocol(ContributionProtocol):
    cdef WaitAvoidingProtocol versions
    cdef LateRule rule
    cdef readonly bint calling, published, direct, keeps, out
    cdef readonly int state
    cdef readonly double snapshot_weight
    cdef readonly long long published_version
    cdef readonly JobCount job
    cdef readonly Lease lease
    cdef public bint keeps_average
    cdef readonly long long kept_version, fetched_version
    cdef readonly double kept_count, fetched_count
    cdef public double loaded_count
    cdef long long joined_at
    cdef bint shares, drops

    cdef void replace(self) noexcept nogil
    cdef void set_snapshot(self, bint filled) noexcept nogil
    cdef void publish(self) noexcept nogil
    cdef void note_published(self) noexcept nogil
    cdef void lend(self) noexcept nogil
    cdef void publish_between_calls(self) noexcept nogil
    cdef void save(self) noexcept nogil
    cdef void fetch_kept(self) noexcept nogil
    cdef void rebase(self) noexcept nogil
    cdef void expire(self) noexcept nogil
    cdef void keep_average(self, long long version) noexcept nogil
    cdef void join(self) noexcept nogil
    cdef void count_once(self) noexcept nogil
    cdef void begin_call(self) noexcept nogil
    cdef void begin_version(self) noexcept nogil
    cdef bint bypasses_snapshot(self) noexcept nogil
    cdef bint is_in_place(self) noexcept nogil
    cdef bint saves_snapshot(self) noexcept nogil
    cdef void end_version(self, double total) noexcept nogil
    cdef void executed(self, double total, bint replaced) noexcept nogil
    cdef void mean_replaces(self) noexcept nogil
    cdef void leave_base(self) noexcept nogil
    cdef double weight_after(self) noexcept nogil
    cdef bint is_late(self) noexcept nogil
    cdef bint has_mean(self) noexcept nogil
    cdef void end_call(self) noexcept nogil
