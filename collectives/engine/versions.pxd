from collectives.engine.all_ranks cimport AllRanks
from collectives.engine.ports cimport VersionsPort
from collectives.memory.allocation cimport Memory
from collectives.protocols.contribution cimport SnapshotProtocol
from collectives.protocols.groups cimport Groups
from collectives.protocols.rank cimport VersionsProtocol
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

cdef class GroupVersions(AllRanks):
    # The same objects as `driven`, `protocol`, `contribution` and `port`.
    cdef VersionsProtocol steps
    cdef WaitAvoidingProtocol versioning
    cdef SnapshotProtocol publishing
    cdef VersionsPort versions_port
    cdef Groups groups
    # The memory of snapshot and result, where it is not shared.
    cdef Memory memory

    cdef int _allocate_vectors(self, bint sharing) except -1
    cdef bint _awaits_device(self) noexcept nogil
    cdef int _drawn(self)
