"""Vectors sent in a narrower dtype, as differences from a vector that all ranks have."""

from libc.stdlib cimport free

from collectives.memory.allocation cimport zeroed
from collectives.memory.layout cimport Layout


def compression(Layout layout, wire_dtype):
    """Return the compression of vectors of a layout to this dtype; None where it changes none."""
    compresses = layout.sent_as(wire_dtype) != layout.dtypes
    return Compression(layout, wire_dtype) if compresses else None


cdef class Compression:
    """Encodes and decodes arrays wider than `wire_dtype`, relative to the vector remembered last.

    The first is zero. Arrays of other dtypes, and those by value, are copied.
    """

    def __init__(self, Layout layout, wire_dtype):
        cdef int i
        dtypes = layout.sent_as(wire_dtype)
        self.layout = layout
        self.wire = Layout(dtypes, layout.lengths, layout.single, layout.make_space)
        self.space = layout.make_space(layout.dtypes, dtypes)
        self.narrowed = <bint *>zeroed(layout.count, sizeof(bint))
        if self.narrowed == NULL:
            raise MemoryError
        for i in range(layout.count):
            self.narrowed[i] = dtypes[i] != layout.dtypes[i]
        self.reference = self.space.allocate(layout.size)
        layout.zero_vector(self.reference.address)

    def __dealloc__(self):
        free(self.narrowed)

    cdef void remember(self, const char *vector) noexcept nogil:
        """Make this vector, equal on all ranks, the reference."""
        self.space.copy(self.reference.address, vector, self.layout.size)

    cdef void encode(
        self, int i, Py_ssize_t first, Py_ssize_t count, char *to, const char *source
    ) noexcept nogil:
        """Write elements of an array, from `first` on, as they are sent."""
        cdef Py_ssize_t itemsize = self.layout.itemsize[i]
        if self.narrowed[i]:
            self.space.encode(i, to, source, (
                self.reference.address + self.layout.begin[i] + first * itemsize), count)
        else:
            self.space.copy(to, source, count * itemsize)

    cdef void decode(
        self, int i, Py_ssize_t first, Py_ssize_t count, char *to, const char *source
    ) noexcept nogil:
        """Write elements of an array, from `first` on, of which `source` is as they were sent."""
        cdef Py_ssize_t itemsize = self.layout.itemsize[i]
        if self.narrowed[i]:
            self.space.decode(i, to, source, (
                self.reference.address + self.layout.begin[i] + first * itemsize), count)
        else:
            self.space.copy(to, source, count * itemsize)

    cdef Py_ssize_t end_in_layout(self, Py_ssize_t end) noexcept nogil:
        """Return the byte of `layout` that corresponds to this end of a block of `wire`."""
        cdef Py_ssize_t first, count
        cdef int i
        if end == self.wire.size:
            return self.layout.size
        for i in range(self.wire.count - 1, -1, -1):
            if self.wire.begin[i] < end:
                count = self.wire.part(i, self.wire.begin[i], end, &first)
                return self.layout.begin[i] + count * self.layout.itemsize[i]
        return end
