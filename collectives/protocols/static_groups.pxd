from collectives.protocols.formed_groups cimport Group, GroupProtocol

cdef int COME, OUT, GROUP, OVER
cdef int OTHERS

cdef class StaticGroupProtocol(GroupProtocol):
    cdef readonly long long alone
    cdef long long pauses, back, last, largest
    cdef bint waiting
    cdef int period
    cdef Group record
    cdef int[::1] members, begins, leaders, left
    cdef long long[::1] message, came, away, begun

    cdef long long iteration(self) noexcept nogil
    cdef int phase(self, long long iteration) noexcept nogil
    cdef void send(self, int rank, int kind, long long number) noexcept nogil
    cdef void look_after_all(self) noexcept nogil
    cdef void look_after(self, int rank) noexcept nogil
    cdef bint is_awaited(self, int rank, long long iteration) noexcept nogil
    cdef void begin_group(self, int phase, long long iteration) noexcept nogil
