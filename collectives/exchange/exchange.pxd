from collectives.exchange.messages.messages cimport Messages
from collectives.exchange.reduction cimport Reduction
from collectives.exchange.shared.shared cimport Shared

cdef class Exchange:
    cdef Reduction reduction
    cdef Messages messages
    # None unless this rank and others use each other's memory.
    cdef Shared shared
    # The transport of the pending exchange.
    cdef void *running

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        double weight, char *source, char **user, bint lent, bint keeps,
        char **target, char **copy, char **saved, int averaged
    ) noexcept nogil
    cdef bint shares(self, const int *members, int size) noexcept nogil
    cdef void begin_in_memory(
        self, long long number, bint together, const int *members, int size,
        char **user, bint lent, bint ringed, bint keeps) noexcept nogil
    cdef void resume_in_memory(self) noexcept nogil
    cdef bint is_in_memory(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void adopt(self, char **kept) noexcept nogil
    cdef void divert(self) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef bint uses(self, char **user) noexcept nogil
