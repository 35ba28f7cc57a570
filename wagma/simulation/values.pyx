"""Averages of simulated ranks' vectors, with the bits of the engine's.

A mean of numbers depends on the order in which they are added. By messages, short vectors are
averaged by recursive doubling, others slice by slice; so are vectors in shared memory.
"""

from libc.stdlib cimport free

from collectives.memory.allocation cimport allocate, zeroed
from collectives.memory.layout cimport HEADER, Layout
from collectives.protocols.slicing cimport suits

cdef enum:
    # Elements of a vector that are averaged at a time.
    PART = 2048
    WIDEST = 8


cdef class Average:
    """Averages vectors of one layout: `begin`, `add` each member's, `compute`, then `write` to each.

    Memory: one vector, and 16 KiB for each of the ranks.

    Args:
        layout: of the vectors.
        most: the largest number of members.
        wire_dtype: see `collectives.GroupAllreduce`; None: vectors are not compressed.

    Source of the orders: `collectives.exchange.messages`, and `collectives.exchange.shared`.
    """

    def __init__(self, Layout layout, int most, wire_dtype=None):
        self.layout = self.wire = layout
        self.most = most
        dtypes = layout.sent_as(wire_dtype)
        self.compressed = dtypes != layout.dtypes
        if self.compressed:
            self.wire = Layout(dtypes, layout.lengths, layout.single)
            self.codec = layout.make_space(layout.dtypes, dtypes)
        self.part_size = PART * WIDEST
        self.mean = allocate(self.wire.size)
        self.parts = allocate(most * self.part_size)
        self.arrays = <char **>zeroed(layout.count, sizeof(char *))
        self.vectors = <const char **>zeroed(most, sizeof(char *))
        self.shares = <double *>zeroed(2 * most, sizeof(double))
        self.weights = <double *>zeroed(most, sizeof(double))
        self.references = <char **>zeroed(most, sizeof(char *))
        self.sources = <char ***>zeroed(most, sizeof(char **))
        if (self.arrays == NULL or self.vectors == NULL or self.shares == NULL
                or self.weights == NULL or self.references == NULL or self.sources == NULL):
            raise MemoryError
        self.wire.locate(self.arrays, self.mean)

    def __dealloc__(self):
        free(self.mean)
        free(self.parts)
        free(self.arrays)
        free(self.vectors)
        free(self.shares)
        free(self.weights)
        free(self.references)
        free(self.sources)

    cdef void begin(self) noexcept nogil:
        """Begin an average of no members, and of all arrays unless `averaged` is set to fewer."""
        self.size = 0
        self.count = 0
        self.averaged = self.layout.count

    cdef void add(self, char **arrays, double weight, char *reference) noexcept nogil:
        """Add the next member, in the order of their ranks.

        Args:
            reference: what it sends differences from, if vectors are compressed.
        """
        self.sources[self.size] = arrays
        self.weights[self.size] = weight
        self.references[self.size] = reference
        self.size += 1

    cdef double compute(self, bint sliced) noexcept nogil:
        """Compute the mean, in slices if members share memory (`sliced`); return its weight."""
        cdef int k
        cdef bint compressed = self.compressed and self.size > 1
        self.weight = 0
        if self.size == 1:
            self.weight = self.weights[0]
        elif sliced or compressed or suits(self._end() - HEADER, self.size):
            for k in range(self.size):
                self.weight += self.weights[k]
            for k in range(self.size):
                self.shares[k] = self.weights[k] / self.weight if self.weight > 0 else 0
            self._slice()
        else:
            self._double()
        return self.weight

    cdef Py_ssize_t _end(self) noexcept nogil:
        """Return where the arrays that are averaged end in a vector that is sent."""
        if self.averaged == self.wire.count:
            return self.wire.size
        return self.wire.begin[self.averaged]

    cdef void _slice(self) noexcept nogil:
        cdef Py_ssize_t first
        cdef int i
        if self.weight == 0:
            return
        for i in range(self.averaged):
            first = 0
            while first < self.layout.length[i]:
                self._slice_part(i, first, min(PART, self.layout.length[i] - first))
                first += PART

    cdef void _slice_part(self, int i, Py_ssize_t first, Py_ssize_t count) noexcept nogil:
        cdef Py_ssize_t begin = first * self.layout.itemsize[i]
        cdef bint coded = self.compressed and self.layout.itemsize[i] != self.wire.itemsize[i]
        cdef char *mean = self.arrays[i] + first * self.wire.itemsize[i]
        cdef int k
        for k in range(self.size):
            self.vectors[k] = self.sources[k][i] + begin
            if coded and self.shares[k] != 0:
                self.codec.encode(
                    i, self.parts + k * self.part_size, self.vectors[k],
                    self.references[k] + self.layout.begin[i] + begin, count)
            if coded:
                self.vectors[k] = self.parts + k * self.part_size
        self.wire.space.mean(i, &mean, 1, self.vectors, self.shares, self.size, count)

    cdef void _double(self) noexcept nogil:
        """Compute the mean as `collectives.protocols.schedule` says: by pairs, then by fours."""
        cdef double *weights = self.shares + self.most
        cdef Py_ssize_t first
        cdef int i
        for i in range(self.averaged):
            first = 0
            while first < self.layout.length[i]:
                self._double_part(
                    i, first, min(PART, self.layout.length[i] - first), weights)
                first += PART
        self.weight = weights[0]

    cdef void _double_part(
        self, int i, Py_ssize_t first, Py_ssize_t count, double *weights
    ) noexcept nogil:
        cdef Py_ssize_t begin = first * self.layout.itemsize[i]
        cdef int core = 1, width = 1, k
        while 2 * core <= self.size:
            core *= 2
        for k in range(self.size):
            self.vectors[k] = self.sources[k][i] + begin
            weights[k] = self.weights[k]
        for k in range(self.size - core):
            self._pair(i, k, k + core, count, weights)
        while width < core:
            k = 0
            while k < core:
                self._pair(i, k, k + width, count, weights)
                k += 2 * width
            width *= 2
        self.layout.space.copy(
            self.arrays[i] + begin, self.vectors[0], count * self.layout.itemsize[i])

    cdef void _pair(
        self, int i, int one, int other, Py_ssize_t count, double *weights
    ) noexcept nogil:
        """Combine the partial means of two members, of which the first then has both."""
        cdef double total = weights[one] + weights[other]
        cdef char *to = self.parts + one * self.part_size
        self.layout.space.combine(
            i, to, self.vectors[one], weights[one] / total if total > 0 else 0,
            self.vectors[other], weights[other] / total if total > 0 else 0, count)
        self.vectors[one] = to
        weights[one] = total

    cdef void write(
        self, char **target, char **copy, char **saved, char **own, char *reference
    ) noexcept nogil:
        """Write the mean to a member's target and copy, if it has a weight; first save the target.

        Args:
            copy, saved: NULL: neither.
            own: what the member contributed, of which it keeps the arrays that are not averaged;
                NULL: zeros in place of a vector.
            reference: the member's, as in `add`.
        """
        cdef int i
        if saved != NULL:
            self.layout.copy(saved, target)
        if self.weight > 0:
            for i in range(self.layout.count):
                if i < self.averaged:
                    self._write_array(i, target[i], reference)
                elif own == NULL:
                    continue
                elif target[i] != own[i]:
                    self.layout.space.copy(target[i], own[i], self.layout.bytes[i])
                if copy != NULL:
                    self.layout.space.copy(copy[i], target[i], self.layout.bytes[i])

    cdef void _write_array(self, int i, char *target, char *reference) noexcept nogil:
        if self.size == 1:
            if target != self.sources[0][i]:
                self.layout.space.copy(target, self.sources[0][i], self.layout.bytes[i])
        elif self.layout.itemsize[i] != self.wire.itemsize[i]:
            self.codec.decode(
                i, target, self.arrays[i], reference + self.layout.begin[i],
                self.layout.length[i])
        else:
            self.layout.space.copy(target, self.arrays[i], self.layout.bytes[i])
