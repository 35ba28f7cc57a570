"""Memory shared by all ranks of a node: words, parts and vectors.

Each rank's words, which synchronize exchanges, and its `Part` are in host memory. So are vectors,
unless they are on devices, whose drivers let other processes map them.
"""

from libc.stdlib cimport free

from collectives.memory.allocation cimport LINE, PAGE, Segment, apart, round_up, zeroed
from collectives.memory.windows cimport address_of, family_at

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef enum:
    # Offsets in a segment, after its token: the rank's `Part`, and its words.
    PARTS = LINE
    WORDS = 4 * LINE  # which leaves three for a `Part`


cdef class SharedMemory:
    """This rank's memory and, once mapped, that of the node's other ranks.

    Args:
        layout: of the vectors.
        rank, size: this rank, and number of ranks.
        words: number of words.
        vectors: whether to have a snapshot and a result vector.
        ring: bytes of the ring; 0: none.

    Raises:
        AttributeError, OSError, CudaError: the system provides no memory that others can map.
    """

    def __init__(
        self, Layout layout, int rank, int size, Py_ssize_t words, bint vectors, Py_ssize_t ring
    ):
        cdef Py_ssize_t places = WORDS + words * sizeof(long long)
        cdef Py_ssize_t begin = round_up(places + layout.count * sizeof(Py_ssize_t), PAGE)
        self.layout = layout
        self.rank = rank
        self.distance = apart(layout.size)
        self.begin_of_ring = 2 * self.distance if vectors else 0
        self.begin_of_places = places
        self.vectors = <char **>zeroed(6 * size, sizeof(char *))
        self.processes = <int *>zeroed(size, sizeof(int))
        if self.vectors == NULL or self.processes == NULL:
            raise MemoryError
        self.parts = <Part **>(self.vectors + size)
        self.words = <unsigned long long **>(self.vectors + 2 * size)
        self.places = <Py_ssize_t **>(self.vectors + 3 * size)
        self.windows = self.vectors + 4 * size
        self.families = <unsigned long long *>(self.vectors + 5 * size)
        self.processes[rank] = getpid()
        self.size = size
        self.segments, self.mapped = [], []
        if layout.space.deferred:
            self.segment = Segment(begin)
            self.exported = layout.space.export(max(self.begin_of_ring + ring, LINE))
            self._place(rank, self.segment, self.exported.address)
        else:
            self.segment = Segment(begin + self.begin_of_ring + ring)
            self._place(rank, self.segment, self.segment.address + begin)

    def __dealloc__(self):
        free(self.vectors)
        free(self.processes)

    cdef _place(self, int rank, Segment segment, char *vectors):
        self.parts[rank] = <Part *>(segment.address + PARTS)
        self.words[rank] = <unsigned long long *>(segment.address + WORDS)
        self.places[rank] = <Py_ssize_t *>(segment.address + self.begin_of_places)
        self.vectors[rank] = vectors

    @property
    def handle(self):
        """What other ranks of the node map this rank's memory by."""
        exported = self.exported is not None
        return self.segment.handle, self.layout.space.handle_of(self.exported) if exported else None

    def map(self, handles):
        """Map the memory of the node's other ranks, given their handles by rank."""
        cdef Segment segment
        cdef Memory vectors
        for rank, (words, exported) in handles.items():
            if rank == self.rank:
                continue
            segment = Segment(self.segment.size, words)
            self.processes[rank] = words[0]
            self.segments.append(segment)
            if exported is None:
                self._place(
                    rank, segment,
                    segment.address + (self.vectors[self.rank] - self.segment.address))
            else:
                vectors = self.layout.space.map(exported)
                self.mapped.append(vectors)
                self._place(rank, segment, vectors.address)

    def close(self):
        """Let no further process map this rank's memory."""
        self.segment.close()

    def unmap(self):
        """Unmap the others' vectors, which are no longer used, before they are freed.

        A device's driver requires that; host memory exists as long as any process maps it.
        """
        self.mapped = []

    cdef char *snapshot(self, int rank) noexcept nogil:
        return self.vectors[rank] + (self.distance if self.parts[rank].swapped else 0)

    cdef char *result(self, int rank) noexcept nogil:
        return self.vectors[rank] + (0 if self.parts[rank].swapped else self.distance)

    cdef char *ring(self, int rank) noexcept nogil:
        return self.vectors[rank] + self.begin_of_ring

    # The application's arrays

    cdef bint show(self, char **arrays) noexcept nogil:
        """Tell others where this rank's arrays are; return whether all are where all can use them.
        """
        cdef Part *part = self.parts[self.rank]
        cdef unsigned long long family = 0
        cdef int i, rank
        for i in range(self.layout.count):
            family = family_at(arrays[i], self.layout.bytes[i], &self.places[self.rank][i])
            if family == 0 or i > 0 and family != part.family:
                return False
            part.family = family
        if family != self.families[self.rank]:
            for rank in range(self.size):
                if self.parts[rank] != NULL and address_of(family, self.processes[rank]) == NULL:
                    return False
            self.families[self.rank] = family
            self.windows[self.rank] = address_of(family, self.processes[self.rank])
        return True

    cdef char *array(self, int rank, int i) noexcept nogil:
        """Return where an array is that a rank shows."""
        cdef unsigned long long family = self.parts[rank].family
        if self.families[rank] != family:
            self.families[rank] = family
            self.windows[rank] = address_of(family, self.processes[rank])
        return self.windows[rank] + self.places[rank][i]
