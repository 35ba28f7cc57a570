cimport cython

from collectives.protocols.contribution cimport NOWHERE, RESULT, SNAPSHOT, X
from collectives.protocols.snapshots cimport (
    REPLACED,
    RETURNED,
    UNFILLED,
    LateRule,
    SnapshotProtocol,
)

cdef class PaperRule(LateRule):
    cdef bint merges(self) noexcept nogil

@cython.final
cdef class SumsRule(PaperRule):
    pass

@cython.final
cdef class ConservingRule(LateRule):
    pass
