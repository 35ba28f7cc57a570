from collectives.protocols.peers cimport Peers

cdef int PUSH, PULL, AWAY
cdef int BSP, BACKUP, ASP, HETE

cdef class ParameterServer(Peers):
    cdef int[::1] waiting
    cdef long long[::1] away
    cdef long long met
    cdef int mode, server, backups, came
    cdef public long long version, held, dropped, lag, pauses

    cdef void take_in(self, int source, long long number) noexcept nogil
    cdef void leaves(self, int source, long long number) noexcept nogil
    cdef void back(self, int source) noexcept nogil
    cdef void reply(self, int rank) noexcept nogil
    cdef void pulled(self, long long version) noexcept nogil
