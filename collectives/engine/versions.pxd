from collectives.engine.collective cimport NativeCollective
from collectives.engine.ports cimport VersionsPort
from collectives.protocols.groups cimport Groups
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.versions cimport VersionsProtocol
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

cdef class GroupVersions(NativeCollective):
    # The same objects as `steps`, `protocol`, `contribution` and `port`.
    cdef VersionsProtocol version_steps
    cdef WaitAvoidingProtocol versions
    cdef SnapshotProtocol publishing
    cdef VersionsPort versions_port
    cdef Groups groups

    cdef int _allocate_vectors(self, leased) except -1
    cdef bint _awaits_device(self) noexcept nogil
    cdef str _between_calls(self)
    cdef str _next_call(self)
    cdef int _drawn(self)
