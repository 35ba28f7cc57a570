cdef class Guard:
    cdef bint taken

    cdef int take(self) except -1
