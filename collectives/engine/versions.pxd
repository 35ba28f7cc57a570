from collectives.engine.all_ranks cimport AllRanks
from collectives.engine.control_tree cimport ControlTree
from collectives.exchange.shared cimport Shared
from collectives.protocols.groups cimport Groups
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

cdef enum:
    # Staleness is counted up to this many versions, and what exceeds it together.
    MOST_STALENESS = 1000

cdef class ActivationTree(ControlTree):
    cdef WaitAvoidingProtocol versioning

cdef class GroupVersions(AllRanks):
    # Why this rank has no memory that others can map.
    cdef readonly str not_shared
    # `protocol`, with its versions.
    cdef WaitAvoidingProtocol versioning
    cdef Groups groups
    cdef int window
    cdef bint conserving
    # What ranks contribute are sums that grow from 0 after each average over all ranks that is
    # published, and a late call gets the newest mean as it is.
    cdef bint summing
    # The vectors' state under the conserving rule: the snapshot is still what was returned; or
    # nothing that a change could be taken against was ever returned or published.
    cdef bint unchanged, unreturned
    # The snapshot holds a finite vector, else its weight is 0.
    cdef bint filled
    # A rank that has joined is `out` once its weight is 0 for good; after how many calls it joined.
    cdef bint out
    cdef long long joined_at
    # Of ranks that share memory: other ranks may begin this one's part.
    cdef Shared shared
    cdef bint opened
    cdef long long opened_for
    # The application is in a call, in publish(), past publishing in a call or operation.
    cdef bint calling, holding, published
    # The vectors: snapshot; result, or under the conserving rule x_returned, which is kept only
    # once the snapshot is no longer `unchanged` since it was returned.
    cdef char *memory
    cdef char *snapshot
    cdef char **snapshot_arrays
    cdef char **result_arrays
    # The group of what the last call took, and its version.
    cdef int *taken
    cdef long long taken_source
    # Statistics
    cdef readonly long long versions, passive
    cdef long long published_version
    cdef long long staleness[MOST_STALENESS + 1]

    cdef int _allocate_vectors(self, bint sharing) except -1
    cdef void _open(self) noexcept nogil
    cdef void _reclaim(self) noexcept nogil
    cdef void _note_executed(self, long long end) noexcept nogil
    cdef void _execute_shared(self) noexcept nogil
    cdef bint _is_behind(self) noexcept nogil
    cdef bint _is_started(self, long long version) noexcept nogil
    cdef long long _next(self) noexcept nogil
    cdef void _describe(self, bint in_place, bint saves) noexcept nogil
    cdef double _weight_after(self) noexcept nogil
    cdef void _let_count_once(self) noexcept nogil
    cdef void _begin_version(self) noexcept nogil
    cdef bint _bypasses_snapshot(self) noexcept nogil
    cdef void _finish_version(self) noexcept nogil
    cdef void _count_version(self, long long version) noexcept nogil
    cdef void _begin_call(self) noexcept nogil
    cdef void _complete_call(self) noexcept nogil
    cdef void _publish_unlocked(self) noexcept nogil
    cdef void _lend_unlocked(self) noexcept nogil
    cdef void _set_weight(self, double weight) noexcept nogil
    cdef void _note_snapshot(self, bint filled) noexcept nogil
    cdef void _replace(self, char **x) noexcept nogil
    cdef void _publish(self, char **x) noexcept nogil
    cdef void _return_snapshot(self) noexcept nogil
    cdef void _absorb_late(self) noexcept nogil
    cdef int _publish_between_calls(self) except -1 nogil
    cdef void _publish_between(self, char **x) noexcept nogil
    cdef int _join(self) except -1 nogil
    cdef int _drawn(self)
