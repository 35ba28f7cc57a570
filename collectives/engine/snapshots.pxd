from collectives.engine.all_ranks cimport AllRanks
from collectives.memory.allocation cimport Memory
from collectives.protocols.contribution cimport SnapshotProtocol
from collectives.protocols.groups cimport Groups
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

cdef enum:
    # The largest staleness, in versions, that is counted; larger ones are counted as this.
    MOST_STALENESS = 1000

cdef class Snapshots(AllRanks):
    # The same object as `protocol`.
    cdef WaitAvoidingProtocol versioning
    cdef Groups groups
    # The same object as `contribution`.
    cdef SnapshotProtocol publishing
    # Where ranks share memory: others may begin this one's part, from the version `opened_for` on.
    cdef bint opened
    cdef long long opened_for
    # The memory of snapshot and result, where it is not shared.
    cdef Memory memory
    cdef char *snapshot
    # Statistics
    cdef readonly long long versions, passive
    cdef long long staleness[MOST_STALENESS + 1]

    cdef int _allocate_vectors(self, bint sharing) except -1
    cdef void _open(self) noexcept nogil
    cdef void _reclaim(self) noexcept nogil
    cdef void _note_executed(self, long long end) noexcept nogil
    cdef void _execute_shared(self) noexcept nogil
    cdef bint _is_open(self) noexcept nogil
    cdef bint _awaits_device(self) noexcept nogil
    cdef bint _is_behind(self) noexcept nogil
    cdef bint _leaves_to_others(self) noexcept nogil
    cdef bint _is_started(self, long long version) noexcept nogil
    cdef long long _next(self) noexcept nogil
    cdef void _describe(self) noexcept nogil
    cdef void _count_version(self, long long version) noexcept nogil
