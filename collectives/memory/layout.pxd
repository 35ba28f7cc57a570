from cpython.buffer cimport Py_buffer

from collectives.memory.space cimport Space

cdef enum:
    # Bytes before the data of a vector in the engine's memory: room for a message's header.
    HEADER = 64

cdef inline double *weight_in(char *message) noexcept nogil:
    """Return the address of the weight in the header of a message that holds a vector."""
    return <double *>message

cdef inline double *count_in(char *message) noexcept nogil:
    """Return the address of the sum of the members' counts in that header."""
    return <double *>message + 1

cdef class Layout:
    cdef readonly int count
    cdef readonly Py_ssize_t size
    cdef readonly tuple dtypes, lengths
    cdef readonly bint single
    # Where vectors are, and the passes over them.
    cdef Space space
    cdef object make_space
    # For each array: the struct module's code for its dtype in the buffer protocol; whether it is
    # averaged by value.
    cdef char *format
    cdef char *by_value
    # For each array: where it begins in a vector, the bytes per element, its elements and bytes.
    cdef Py_ssize_t *begin
    cdef Py_ssize_t *itemsize
    cdef Py_ssize_t *length
    cdef Py_ssize_t *bytes

    cdef Py_ssize_t part(
        self, int i, Py_ssize_t low, Py_ssize_t high, Py_ssize_t *first) noexcept nogil
    cdef void locate(self, char **arrays, char *vector) noexcept nogil
    cdef void copy(self, char **to, char **source) noexcept nogil
    cdef void zero(self, char **arrays) noexcept nogil
    cdef void zero_vector(self, char *vector) noexcept nogil
    cdef void combine(self, char **x, double share_x, char **m, double share_m) noexcept nogil
    cdef void add_change(
        self, char **to, char **snapshot, char **x, char **returned) noexcept nogil
    cdef bint all_finite(self, char **x) noexcept nogil
    cdef bint finite_change(self, char **snapshot, char **x, char **returned) noexcept nogil
    cdef void begin_finite_change(
        self, int *flag, char **snapshot, char **x, char **returned) noexcept nogil
    cdef bint take_change(self, char **x, char **snapshot, char **returned) noexcept nogil

cdef class DeviceVector:
    cdef readonly list addresses

cdef class UserVector:
    cdef char **arrays
    # The addresses of arrays on a device; else NULL.
    cdef char **addresses
    cdef _point_to(self, DeviceVector vector, Layout layout)
    cdef Py_buffer *views
    cdef int count
