from collectives.memory.layout cimport Layout

cdef class Blocks:
    cdef readonly Layout layout
    cdef readonly int count
    cdef readonly Py_ssize_t length
    # For each block, the first array of which it contains a part.
    cdef int *first

    cdef Py_ssize_t begin(self, int block) noexcept nogil
    cdef Py_ssize_t end(self, int block) noexcept nogil
    cdef Py_ssize_t size(self, int block) noexcept nogil
    cdef bint part(
        self, int block, int i, Py_ssize_t *offset, Py_ssize_t *count) noexcept nogil
    cdef void combine(
        self, int block, char **to, char **x, double share_x, char **m, double share_m
    ) noexcept nogil
    cdef void scale(self, int block, char **to, char **source, double factor) noexcept nogil
    cdef void copy(self, int block, char *to, char *source) noexcept nogil
    cdef void zero(self, int block, char *vector) noexcept nogil
