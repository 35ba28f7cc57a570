"""The blocks in which a vector is sent, and processed while in cache."""

from libc.stdlib cimport free

from collectives.memory.allocation cimport zeroed
from collectives.memory.layout cimport HEADER, Layout


cdef class Blocks:
    """The passes over one block of a vector, which contains parts of one or several arrays.

    Args:
        layout: the vector's layout.
        length: bytes of each block except the last; a multiple of 64.
    """

    def __init__(self, Layout layout, Py_ssize_t length):
        cdef int block, i = 0
        self.layout = layout
        self.length = length
        self.count = <int>max(1, (layout.size - HEADER + length - 1) // length)
        self.first = <int *>zeroed(self.count, sizeof(int))
        if self.first == NULL:
            raise MemoryError
        for block in range(self.count):
            while (i + 1 < layout.count
                   and layout.begin[i] + layout.bytes[i] <= self.begin(block)):
                i += 1
            self.first[block] = i

    def __dealloc__(self):
        free(self.first)

    cdef Py_ssize_t begin(self, int block) noexcept nogil:
        """Return where the block begins in a vector in the engine's memory."""
        return HEADER + block * self.length

    cdef Py_ssize_t end(self, int block) noexcept nogil:
        return self.begin(block) + self.size(block)

    cdef Py_ssize_t size(self, int block) noexcept nogil:
        """Return the bytes of the block, including the padding between arrays."""
        return min(self.length, self.layout.size - self.begin(block))

    cdef bint part(
        self, int block, int i, Py_ssize_t *offset, Py_ssize_t *count
    ) noexcept nogil:
        """Set the offset in bytes of the block's part of array i, and its number of elements.

        Return whether array i exists and begins before the block's end.
        """
        cdef Py_ssize_t begin = self.begin(block)
        cdef Py_ssize_t end = self.end(block)
        if i >= self.layout.count or self.layout.begin[i] >= end:
            return False
        count[0] = self.layout.part(i, begin, end, offset)
        offset[0] *= self.layout.itemsize[i]
        return True

    cdef void combine(
        self, int block, char **to, char **x, double share_x, char **m, double share_m
    ) noexcept nogil:
        """to = share_x · x + share_m · m"""
        cdef Py_ssize_t offset, count
        cdef int i = self.first[block]
        while self.part(block, i, &offset, &count):
            self.layout.space.combine(
                i, to[i] + offset, x[i] + offset, share_x, m[i] + offset, share_m, count)
            i += 1

    cdef void scale(self, int block, char **to, char **source, double factor) noexcept nogil:
        """to = factor · source"""
        cdef Py_ssize_t offset, count
        cdef int i = self.first[block]
        if factor != 1:
            self.combine(block, to, source, factor, source, 0)
            return
        while self.part(block, i, &offset, &count):
            self.layout.space.copy(
                to[i] + offset, source[i] + offset, count * self.layout.itemsize[i])
            i += 1

    cdef void copy(self, int block, char *to, char *source) noexcept nogil:
        """Copy a block of one vector in the engine's memory to another."""
        self.layout.space.copy(to + self.begin(block), source + self.begin(block), self.size(block))

    cdef void zero(self, int block, char *vector) noexcept nogil:
        """Zero a block of a vector in the engine's memory."""
        self.layout.space.zero(vector + self.begin(block), self.size(block))
