"""A rank's vectors in one `Space`, by the names that `protocols.contribution` gives them."""

from libc.stdlib cimport free

from collectives.memory.allocation cimport Memory, apart, zeroed
from collectives.memory.layout cimport Layout
from collectives.memory.handover cimport UNKNOWN
from collectives.protocols.contribution cimport RESULT, SNAPSHOT, X, Vectors

cdef enum:
    VECTORS = 5


cdef class HostVectors(Vectors):
    """The application's vector and the rank's own vectors, of one layout."""

    def __init__(self, Layout layout):
        self.layout = layout
        self.finite = UNKNOWN
        self.change_finite = layout.space.new_flag()
        self.memories = []
        self.located = <char **>zeroed(VECTORS * layout.count, sizeof(char *))
        if self.located == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.located)
        free(self.part)

    cdef char *allocate(self, int vector, int count) except NULL:
        """Allocate memory for this vector and those that follow it; return where it begins."""
        cdef Py_ssize_t distance = apart(self.layout.size)
        cdef Memory memory = self.layout.space.allocate(
            (count - 1) * distance + self.layout.size)
        cdef int i
        self.memories.append(memory)
        for i in range(count):
            self.place(vector + i, memory.address + i * distance)
        return memory.address

    cdef int have_part(self, int begin, int end) except -1:
        """Allocate memory for the rank's own part of these arrays."""
        cdef Py_ssize_t offset = 0
        cdef Memory memory
        cdef int i
        self.part = <char **>zeroed(self.layout.count, sizeof(char *))
        if self.part == NULL:
            raise MemoryError
        first = self.layout.begin[begin]
        last = self.layout.begin[end - 1] + self.layout.bytes[end - 1]
        memory = self.layout.space.allocate(last - first)
        self.memories.append(memory)
        for i in range(begin, end):
            offset = self.layout.begin[i] - self.layout.begin[begin]
            self.part[i] = memory.address + offset
        self.part_begin, self.part_end = begin, end
        return 0

    cdef void place(self, int vector, char *memory) noexcept nogil:
        """Place one of the rank's own vectors in this memory."""
        self.start[vector] = memory
        self.of[vector] = self.located + vector * self.layout.count
        self.layout.locate(self.of[vector], memory)

    cdef char **arrays(self, int vector) noexcept nogil:
        """Return the addresses of a vector's arrays; NULL for NOWHERE."""
        return self.of[vector] if vector >= 0 else NULL

    cdef void copy(self, int to, int source) noexcept nogil:
        self.layout.copy(self.of[to], self.of[source])

    cdef void zero(self, int vector) noexcept nogil:
        self.layout.zero(self.of[vector])

    cdef bint all_finite(self, int vector) noexcept nogil:
        if vector == X and self.finite != UNKNOWN:
            return self.finite
        return self.layout.all_finite(self.of[vector])

    cdef bint knows_change(self) noexcept nogil:
        """Return whether `is_change_finite` answers without waiting for a device.

        The first call queues the check on the device.
        """
        if not self.layout.space.deferred:
            return True
        if not self.asked:
            self.asked = True
            self.change_finite[0] = 1
            self.layout.begin_finite_change(
                self.change_finite, self.of[SNAPSHOT], self.of[X], self.of[RESULT])
            self.answered = self.layout.space.begun()
        return self.layout.space.over(self.answered)

    cdef bint knows_finite(self, char **x) noexcept nogil:
        """Return whether `all_finite(X)` answers without waiting for a device.

        The first call queues the check on the device; `finite` is set once its answer has arrived.
        """
        cdef int i
        if self.finite != UNKNOWN or not self.layout.space.deferred:
            return True
        if not self.asked:
            self.asked = True
            self.change_finite[0] = 1
            for i in range(self.layout.count):
                self.layout.space.begin_all_finite(
                    self.change_finite, i, x[i], self.layout.length[i])
            self.answered = self.layout.space.begun()
        if not self.layout.space.over(self.answered):
            return False
        self.asked = False
        self.finite = self.change_finite[0]
        return True

    cdef bint is_change_finite(self) noexcept nogil:
        if self.asked and self.layout.space.over(self.answered):
            self.asked = False
            return self.change_finite[0]
        return self.layout.finite_change(self.of[SNAPSHOT], self.of[X], self.of[RESULT])

    cdef void add_change(self, int to) noexcept nogil:
        self.layout.add_change(self.of[to], self.of[SNAPSHOT], self.of[X], self.of[RESULT])

    cdef bint take_change(self) noexcept nogil:
        if self.layout.space.deferred:
            return Vectors.take_change(self)
        if not self.layout.take_change(self.of[X], self.of[SNAPSHOT], self.of[RESULT]):
            self.copy(X, SNAPSHOT)
            return False
        self.of[SNAPSHOT], self.of[RESULT] = self.of[RESULT], self.of[SNAPSHOT]
        self.start[SNAPSHOT], self.start[RESULT] = self.start[RESULT], self.start[SNAPSHOT]
        if self.swapped != NULL:
            self.swapped[0] = not self.swapped[0]
        return True

    cdef void absorb(self, double own, double total) noexcept nogil:
        self.layout.combine(
            self.of[X], own / (total + own), self.of[RESULT], total / (total + own))

    cdef void keep_part(self) noexcept nogil:
        cdef int i
        for i in range(self.part_begin, self.part_end):
            self.layout.space.copy(self.part[i], self.of[X][i], self.layout.bytes[i])

    cdef void take_out_part(self) noexcept nogil:
        self._add_part(-1)

    cdef void put_back_part(self) noexcept nogil:
        self._add_part(1)

    cdef void _add_part(self, double times) noexcept nogil:
        """SNAPSHOT = SNAPSHOT + times · part"""
        cdef char **snapshot = self.of[SNAPSHOT]
        cdef int i
        for i in range(self.part_begin, self.part_end):
            self.layout.space.combine(
                i, snapshot[i], snapshot[i], 1, self.part[i], times, self.layout.length[i])
