from collectives.protocols.formed_groups cimport Group, GroupProtocol
from collectives.protocols.group_generator cimport GroupGenerator
from collectives.protocols.paces cimport NEVER, UNKNOWN, Paces

cdef int REQUEST, PAUSE, GROUP, NOBODY, PAUSED, AWAITED
cdef int MEETING, REQUESTING, EVER
cdef int HEADER, ANY, OTHERS
cdef long long LAST

cdef class GeneratedGroupProtocol(GroupProtocol):
    cdef readonly GroupGenerator generator
    cdef readonly int controller
    cdef readonly long long alone
    cdef long long pauses, now, since
    cdef bint waiting, deferred, pausing
    cdef Paces paces
    cdef int unanswered, stride, room, first, count
    cdef Group record
    cdef long long[::1] message, kept

    cdef void request(self) noexcept nogil
    cdef void wait_on(self) noexcept nogil
    cdef void go_on(self) noexcept nogil
    cdef void let_go(self, int until) noexcept nogil
    cdef void remind(self, long long number, bint too_long) noexcept nogil
    cdef void keep(self, long long[::1] integers) noexcept nogil
    cdef void proceed(self) noexcept nogil
    cdef void end_call(self) noexcept nogil
    cdef void end_alone(self) noexcept nogil
    cdef void send(self, int rank, int kind, int detail) noexcept nogil
    cdef void answer(self, int source, int formed) noexcept nogil
