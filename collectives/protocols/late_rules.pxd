cimport cython

from collectives.protocols.contribution cimport NOWHERE, RESULT, SNAPSHOT, X
from collectives.protocols.snapshots cimport AVERAGED, EMPTY, RETURNED, LateRule, SnapshotProtocol

cdef class PaperRule(LateRule):
    cdef bint merges(self) noexcept nogil

@cython.final
cdef class SumsRule(PaperRule):
    pass

@cython.final
cdef class ConservingRule(LateRule):
    pass
