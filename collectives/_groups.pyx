# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""`topology.Shuffle` on C arrays, for the engine to find a version's group without the GIL."""

from libc.stdlib cimport calloc, free

from collectives.topology import shuffle


cdef class Groups:
    """The groups of one rank."""

    def __init__(self, int rank, int size, int group_size):
        cdef int position, place = 0
        cdef int *base = <int *>calloc(8 * size, sizeof(int))
        if base == NULL:
            raise MemoryError
        self.rank = rank
        self.cycles = base
        self.cycle_begin, self.cycle_length = base + size, base + 2 * size
        self.cycle_index, self.chunk_begin = base + 3 * size, base + 4 * size
        self.chunk_end, self.members = base + 5 * size, base + 6 * size
        self.everyone = base + 7 * size
        sigma = shuffle(size, group_size)
        begin = {}
        for position in range(size):
            cycle = sigma.cycle[position]
            if cycle[0] not in begin:
                begin[cycle[0]] = place
                for rank in cycle:
                    self.cycles[place] = rank
                    place += 1
            self.cycle_begin[position] = begin[cycle[0]]
            self.cycle_length[position] = len(cycle)
            self.cycle_index[position] = sigma.index[position]
            self.chunk_begin[position] = sigma.bounds[sigma.chunk[position]]
            self.chunk_end[position] = sigma.bounds[sigma.chunk[position] + 1]
            self.everyone[position] = position

    def __dealloc__(self):
        free(self.cycles)

    cdef int find(self, long long version) noexcept nogil:
        """Fill `members` with this rank's group of the version; return its own place in it.

        This is `topology.Shuffle.members`.
        """
        cdef long long length = self.cycle_length[self.rank]
        cdef int position = self.cycles[
            self.cycle_begin[self.rank]
            + <int>((self.cycle_index[self.rank] - version % length + length) % length)
        ]
        cdef int first = self.chunk_begin[position]
        cdef int each
        self.count = self.chunk_end[position] - first
        for each in range(first, first + self.count):
            self.members[each - first] = self.cycles[
                self.cycle_begin[each]
                + <int>((self.cycle_index[each] + version) % self.cycle_length[each])
            ]
        return position - first
