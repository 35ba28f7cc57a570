from collectives.protocols.peers cimport PeerProtocol

cdef int PUSH, PULL, LAST
cdef int BSP, BACKUP, ASP, HETE, RINGMASTER, ASYNC_LOCAL
cdef long long ANY_AGE

cdef class ParameterServerProtocol(PeerProtocol):
    cdef int[::1] waiting
    cdef double[::1] speeds
    cdef int mode, server, backups, came
    cdef double whole, share, momentum, highest
    cdef public double speed, fastest
    cdef long long max_age
    cdef public long long version, held, dropped, lag

    cdef void restart_momentum(self) noexcept nogil
    cdef void absorb(self, int source, long long number, double speed) noexcept nogil
    cdef void reply(self, int rank) noexcept nogil
    cdef void note_speed(self, int rank, double speed) noexcept nogil
    cdef void pulled(self, long long version, double fastest) noexcept nogil
    cpdef long long steps_beside(self, long long most) noexcept
    cdef void settle(self, int source) noexcept nogil
