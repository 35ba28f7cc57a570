from collectives.memory.allocation cimport Segment

cdef class Family:
    # Its number; this process's segment, and those of others by process, which keep them mapped.
    cdef readonly unsigned long long number
    cdef Segment own
    cdef dict segments
    # How many arrays of this process are in its window.
    cdef int arrays

    cdef bint is_released(self)

cdef class Window:
    cdef Family family
    cdef Py_ssize_t offset, size

cdef unsigned long long family_at(
    const char *address, Py_ssize_t size, Py_ssize_t *offset) noexcept nogil
cdef bint move_away(unsigned long long family) noexcept nogil
cdef char *address_of(unsigned long long family, int process) noexcept nogil
