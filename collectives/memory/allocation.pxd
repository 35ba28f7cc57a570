cdef enum:
    LINE = 64
    PAGE = 4096
    HUGE_PAGE = 2097152

cdef inline Py_ssize_t round_up(Py_ssize_t number, Py_ssize_t unit) noexcept nogil:
    return (number + unit - 1) // unit * unit

cdef inline Py_ssize_t apart(Py_ssize_t size) noexcept nogil:
    """Return how far apart vectors of this size begin, one after the other.

    A pass may read one and write another: at about the same offsets in their pages, each store
    would delay the next load.
    """
    return round_up(size, PAGE) + PAGE // 2

cdef bint fails() noexcept nogil
cdef void *zeroed(size_t count, size_t size) noexcept nogil
cdef void *resized(void *memory, size_t size) noexcept nogil
cdef char *allocate(Py_ssize_t size) except NULL
cdef char *try_to_allocate(Py_ssize_t size) noexcept nogil

cdef void *aligned_place(size_t size) noexcept

cdef class Memory:
    cdef char *address

cdef class Segment:
    cdef readonly Py_ssize_t size
    cdef char *address
    cdef int descriptor
    cdef bytes token

    cdef int make_private(self) except -1
