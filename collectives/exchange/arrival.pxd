cimport cython

from collectives.memory.handover cimport Handover

@cython.final
cdef class Arrival:
    cdef Handover handover
    # The application's arrays while the handover has them, else NULL; whether they are averaged
    # once more before they return.
    cdef char **arrays
    cdef bint more

    cdef bint has(self, char **arrays, Py_ssize_t end) noexcept nogil
    cdef void give_back(self, char **arrays, Py_ssize_t end) noexcept nogil
