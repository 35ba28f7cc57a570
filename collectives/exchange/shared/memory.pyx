"""Memory shared by all ranks of a node: words, parts and vectors.

Each rank's words, which synchronize exchanges, and its `Part` are in host memory. So are vectors,
unless they are on devices, whose drivers let other processes map them.
"""

from libc.stdlib cimport free

from collectives.memory.allocation cimport LINE, PAGE, Segment, apart, round_up, zeroed
from collectives.memory.windows cimport address_of, family_at, move_away
from collectives.protocols.slots cimport SLOTS, WORDS as WORDS_OF_SLOTS

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef enum:
    # Offsets in a segment, after its token: the rank's `Part`, and its words.
    PARTS = LINE
    WORDS = 4 * LINE  # which leaves three for a `Part`
    # Windows of each rank whose addresses are at hand.
    KNOWN = 8
    # Bytes of the slots' words.
    SLOT_WORDS = WORDS_OF_SLOTS * 8


cdef class SharedMemory:
    """This rank's memory and, once mapped, that of the node's other ranks.

    Args:
        layout: of the vectors.
        rank, size: this rank, and number of ranks.
        words: number of words.
        vectors: whether to have a snapshot and a result vector.
        ring: bytes of the ring; 0: none.
        slots: whether to have slots.

    Raises:
        AttributeError, OSError, CudaError: the system provides no memory that others can map.
    """

    def __init__(
        self, Layout layout, int rank, int size, Py_ssize_t words, bint vectors, Py_ssize_t ring,
        bint slots
    ):
        cdef Py_ssize_t places = WORDS + words * sizeof(long long)
        cdef Py_ssize_t begin = round_up(places + layout.count * sizeof(Place), PAGE)
        cdef Py_ssize_t end
        self.layout = layout
        self.rank = rank
        self.distance = apart(layout.size)
        self.begin_of_ring = 2 * self.distance if vectors else 0
        self.begin_of_slots = self.begin_of_ring + round_up(ring, PAGE)
        self.begin_of_places = places
        self.vectors = <char **>zeroed(5 * size, sizeof(char *))
        self.processes = <int *>zeroed(size, sizeof(int))
        self.known = <Known *>zeroed(KNOWN * size, sizeof(Known))
        if self.vectors == NULL or self.processes == NULL or self.known == NULL:
            raise MemoryError
        self.parts = <Part **>(self.vectors + size)
        self.words = <unsigned long long **>(self.vectors + 2 * size)
        self.places = <Place **>(self.vectors + 3 * size)
        self.slot_words = <unsigned long long **>(self.vectors + 4 * size)
        self.processes[rank] = getpid()
        self.size = size
        self.segments, self.mapped = [], []
        if layout.space.deferred:
            self.segment = Segment(begin)
            self.exported = layout.space.export(max(self.begin_of_ring + ring, LINE))
            self._place(rank, self.segment, self.exported.address)
        else:
            end = begin + self.begin_of_slots
            if slots:
                end += SLOT_WORDS + SLOTS * self.distance
            self.segment = Segment(end)
            self._place(rank, self.segment, self.segment.address + begin)

    def __dealloc__(self):
        free(self.vectors)
        free(self.processes)
        free(self.known)

    cdef _place(self, int rank, Segment segment, char *vectors):
        self.parts[rank] = <Part *>(segment.address + PARTS)
        self.words[rank] = <unsigned long long *>(segment.address + WORDS)
        self.places[rank] = <Place *>(segment.address + self.begin_of_places)
        self.vectors[rank] = vectors
        self.slot_words[rank] = <unsigned long long *>(vectors + self.begin_of_slots)

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

    cdef char *slot(self, int rank, int k) noexcept nogil:
        """Return where the vector is in one of a rank's slots."""
        return <char *>self.slot_words[rank] + SLOT_WORDS + k * self.distance

    # The application's arrays

    cdef bint show(self, char **arrays) noexcept nogil:
        """Tell others where this rank's arrays are; return whether all are where all can use them.
        """
        cdef Place *places = self.places[self.rank]
        cdef int i, rank
        for i in range(self.layout.count):
            places[i].family = family_at(arrays[i], self.layout.bytes[i], &places[i].offset)
            if places[i].family == 0 and not self.copies:
                return False
            if places[i].family == 0:
                places[i].family, places[i].offset = ELSEWHERE, <Py_ssize_t>arrays[i]
                continue
            if i > 0 and places[i].family == places[i - 1].family:
                continue
            for rank in range(self.size):
                if self.parts[rank] != NULL and self._window(rank, places[i].family) == NULL:
                    return False
        return True

    cdef void leave(self) noexcept nogil:
        """Give the application its arrays back, although other ranks may still use the windows."""
        cdef Place *places = self.places[self.rank]
        cdef int i
        for i in range(self.layout.count):
            if move_away(places[i].family):
                self.known[self.rank * KNOWN + places[i].family % KNOWN].family = 0

    cdef char *_window(self, int rank, unsigned long long family) noexcept nogil:
        """Return where a rank's window begins here; NULL: it is not mapped."""
        cdef Known *known = self.known + rank * KNOWN + family % KNOWN
        if known.family != family:
            known.window = address_of(family, self.processes[rank])
            known.family = family if known.window != NULL else 0
        return known.window

    cdef bint is_elsewhere(self, int rank, int i) noexcept nogil:
        """Return whether an array that a rank shows is in the memory of its process only."""
        return rank != self.rank and self.places[rank][i].family == ELSEWHERE

    cdef char *array(self, int rank, int i) noexcept nogil:
        """Return where an array is that a rank shows; its address there if it is elsewhere."""
        if self.places[rank][i].family == ELSEWHERE:
            return <char *>self.places[rank][i].offset
        return self._window(rank, self.places[rank][i].family) + self.places[rank][i].offset
