from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport TreePort
from collectives.protocols.contribution cimport Vectors
from collectives.protocols.rank_port cimport RankPort
from collectives.protocols.snapshots cimport SnapshotProtocol
from wagma.simulation.core cimport Method
from wagma.simulation.values cimport Average

cdef enum:
    # Events: an activation has arrived, or word that any rank may start versions; a pass over
    # vectors has ended; a member is ready to exchange; a rank has the mean of its group, or of all
    # ranks; all ranks have agreed on an operation.
    ACTIVATED
    FREED
    PASSED
    READY
    EXCHANGED
    AGREED
    # Bytes of an activation, and of a rank's record in the agreement on an operation.
    ACTIVATION = 16

cdef class VersionsMethod(Method):
    cdef int[:, ::1] peers
    cdef double staging_time, copy_time

    cdef void join_group(self, int rank, long long version)
    cdef void join_all(self)
    cdef void count_version(self, long long version, SnapshotProtocol contribution, dict counts)
    cdef void end_call(self, int rank, SnapshotProtocol contribution, bint in_group)

cdef class SimulatedTree(TreePort):
    cdef VersionsMethod method
    cdef int rank

cdef class WrittenVectors(Vectors):
    cdef int passes
    cdef HostVectors values
    cdef UserVector given

    cdef int give(self, vector) except -1

cdef class SimulatedPort(RankPort):
    cdef VersionsMethod method
    cdef int rank
    cdef SnapshotProtocol publishing
    cdef WrittenVectors vectors
    cdef bint exchanged
    cdef double copies_after, total, count
    cdef tuple group
    # What compressed vectors are relative to.
    cdef Memory reference
    cdef dict staleness

    cdef void _begin_exchange(self) noexcept nogil
    cdef char *referred(self) noexcept nogil
    cdef void contribute(self, Average average) noexcept nogil
    cdef void take(self, Average average) noexcept nogil
