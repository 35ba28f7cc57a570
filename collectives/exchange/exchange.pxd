from collectives.exchange.doubling cimport Doubling
from collectives.exchange.shared cimport Shared
from collectives.exchange.slices cimport Slices
from collectives.exchange.reduction cimport Reduction

cdef class Exchange:
    cdef Reduction reduction
    cdef Doubling doubling
    cdef Slices slices
    cdef Shared shared
    cdef Py_ssize_t length
    cdef bint sliced, in_memory
    # The exchange begins once the application's vector has arrived from its device.
    cdef bint coming
    # The ticket of the passes that write the mean of a single member.
    cdef long long written

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        double weight, char *source, char **user, bint given, bint keeps,
        char **target, char **copy, char **saved
    ) noexcept nogil
    cdef void _begin_whole(self) noexcept nogil
    cdef bint shares(self, const int *members, int size) noexcept nogil
    cdef void begin_in_memory(
        self, long long number, bint together, const int *members, int size,
        char **user, bint given, bint ringed) noexcept nogil
    cdef void resume_in_memory(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void adopt(self, char **kept) noexcept nogil
    cdef void divert(self) noexcept nogil
    cdef bint uses(self, char **user) noexcept nogil
