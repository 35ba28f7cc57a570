from collectives.protocols.paces cimport NEVER
from collectives.protocols.rank_port cimport StepPort

cdef int RECORD

cdef class Group:
    cdef readonly long long number
    cdef readonly int size, room
    cdef readonly bint equal
    cdef readonly int[::1] members
    cdef readonly double[::1] weights
    cdef long long[::1] bits

    cdef void clear(self, long long number) noexcept nogil
    cdef void add(self, int member, double weight) noexcept nogil
    cdef int index_of(self, int rank) noexcept nogil
    cdef int write(self, long long[::1] integers, int first) noexcept nogil
    cdef int read(self, long long[::1] integers, int first) noexcept nogil

cdef class GroupPort(StepPort):
    cdef void send(self, int destination, long long[::1] integers) noexcept nogil
    cdef void reduce(self, Group group) noexcept nogil
    cdef bint under_way(self, Group group) noexcept nogil
    cdef void return_model(self) noexcept nogil

cdef class GroupProtocol:
    cdef GroupPort port
    cdef readonly int rank, size
    cdef readonly long long calls
    cdef readonly bint calling, leaving, passive
    cdef public long long sync_every
    cdef readonly long long due

    cdef void begin(self) noexcept nogil
    cdef void passed(self, long long time) noexcept nogil
    cdef void fell_due(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef bint skips(self) noexcept nogil
    cdef bint averages(self) noexcept nogil
    cdef void arrived(self, int source, long long[::1] integers) noexcept nogil
    cdef void reduced(self, Group group) noexcept nogil
    cdef void overdue(self) noexcept nogil
    cdef void returned(self) noexcept nogil
    cdef void pause(self) noexcept nogil
    cdef void resume(self) noexcept nogil
    cdef void restart(self, long long calls) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef bint is_quiet(self) noexcept nogil
    cdef bint waits_for(self, int rank) noexcept nogil
