cdef int NOTHING
cdef int ADD
cdef int TAKE

cdef class Schedule:
    cdef public bint done, sends
    cdef public int peer, receives, phase
    cdef readonly int size, me
    cdef int core, phases

    cdef void begin(self, int size, int me) noexcept nogil
    cdef void advance(self) noexcept nogil
