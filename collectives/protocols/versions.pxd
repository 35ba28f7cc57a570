cimport cython

from collectives.protocols.all_ranks cimport AVERAGE, JOIN
from collectives.protocols.rank cimport RETURN, WAIT, RankProtocol
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.wait_avoiding cimport HELD, IDLE, RUNNING, SHARED, WaitAvoidingProtocol

cdef int BEGIN_VERSION, END_VERSION, PUBLISH, SHARE
cdef int PUBLISHING, JOINING, FETCHING, REBASING, LEASING

@cython.final
cdef class VersionsProtocol(RankProtocol):
    cdef WaitAvoidingProtocol versions
    cdef SnapshotProtocol publishing
    cdef readonly bint holding, opened
    cdef readonly int purpose
    cdef readonly long long source
    cdef long long opened_for

    cdef void begin(self, bint shares) noexcept nogil
    cdef void take_back(self) noexcept nogil
    cdef bint is_due_to_expire(self, long long version) noexcept nogil
    cdef void expire_if_due(self, long long version) noexcept nogil
    cdef void begin_version(self) noexcept nogil
    cdef void end_version(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef void end_call(self) noexcept nogil
    cdef void hold(self, int purpose) noexcept nogil
    cdef void use_between_calls(self) noexcept nogil
    cdef void let_go(self) noexcept nogil
    cdef void end_sharing(self) noexcept nogil
    cdef void open(self) noexcept nogil
    cdef void reclaim(self) noexcept nogil
    cdef void learn_counts(self) noexcept nogil
    cdef void note_executed(self, long long end) noexcept nogil
    cdef bint serve_opened(self) noexcept nogil
    cdef bint is_started(self, long long version) noexcept nogil
    cdef long long next_version(self) noexcept nogil
    cdef bint is_joining(self) noexcept nogil
    cdef bint is_open(self) noexcept nogil
    cdef bint is_behind(self) noexcept nogil
