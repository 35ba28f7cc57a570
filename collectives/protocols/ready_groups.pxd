from collectives.protocols.formed_groups cimport Group, GroupProtocol
from collectives.protocols.ready_controller cimport PartialReduceController

cdef int READY, PAUSE, LEAVE, OVERDUE, GROUP, NOTED
cdef double SHARE

cdef class ReadyGroupProtocol(GroupProtocol):
    cdef readonly PartialReduceController controller
    cdef readonly int controller_rank
    cdef readonly long long iteration
    cdef readonly double initial_share, initial_total
    cdef public bint fresh
    cdef long long pauses
    cdef int unknown
    cdef bint grouped
    cdef Group group
    cdef long long[::1] message

    cdef void notify(self, int kind) noexcept nogil
    cdef void control(
        self, int source, long long kind, long long iteration, long long pauses, bint fresh
    ) noexcept nogil
    cdef void broadcast(self) noexcept nogil
    cdef void form(self, bint judges) noexcept nogil
