from collectives._doubling cimport Doubling
from collectives._slices cimport Slices
from collectives._task cimport Task

cdef class Exchange:
    cdef Task task
    cdef Doubling doubling
    cdef Slices slices
    cdef Py_ssize_t length
    cdef bint sliced

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        char *source, char **user, bint given, bint keeps, char **target, char **copy, char **saved
    ) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void divert(self) noexcept nogil
    cdef bint uses(self, char **user) noexcept nogil
