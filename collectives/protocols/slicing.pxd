cdef Py_ssize_t LINE
cdef Py_ssize_t SHORTEST
cdef Py_ssize_t LONGEST
cdef Py_ssize_t LONGEST_SHARED
cdef Py_ssize_t SHORTEST_ON_DEVICE
cdef Py_ssize_t SHORTEST_VECTOR
cdef Py_ssize_t BLOCKS
cdef Py_ssize_t LONGEST_BLOCK

cdef class Slicing:
    cdef readonly Py_ssize_t length, block, blocks
    cdef readonly int size

    cdef void begin(self, Py_ssize_t length, int size) noexcept nogil
    cdef void lay_out(self, Py_ssize_t length, int size, Py_ssize_t shortest) noexcept nogil
    cdef Py_ssize_t end(self, Py_ssize_t block) noexcept nogil
    cdef Py_ssize_t bound(self, Py_ssize_t block, int member) noexcept nogil

cdef bint suits(Py_ssize_t length, int size) noexcept nogil
cdef Py_ssize_t shared_block(Py_ssize_t length, int size, Py_ssize_t on_device) noexcept nogil
cdef Py_ssize_t most_shared_blocks(Py_ssize_t length, int size) noexcept nogil
