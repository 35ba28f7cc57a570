"""`topology.Shuffle` on C arrays, so that the engine finds a version's group without the GIL."""

from libc.stdlib cimport calloc, free

from collectives.topology import shuffle


cdef class Groups:
    """The groups of one rank."""

    def __init__(self, int rank, int size, int group_size, bint fixed=False):
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
        sigma = shuffle(size, group_size, fixed)
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
        """Fill `members` with this rank's group of the version; return the rank's index in it."""
        cdef int position = self._position(self.rank, version)
        self.count = self.of(self.rank, version, self.members)
        return position - self.chunk_begin[position]

    cdef int of(self, int rank, long long version, int *members) noexcept nogil:
        """Fill `members` with a rank's group of the version; return the number of members.

        This is `topology.Shuffle.members`.
        """
        cdef int position = self._position(rank, version)
        cdef int first = self.chunk_begin[position]
        cdef int each
        for each in range(first, self.chunk_end[position]):
            members[each - first] = self.cycles[
                self.cycle_begin[each]
                + <int>((self.cycle_index[each] + version) % self.cycle_length[each])
            ]
        return self.chunk_end[position] - first

    cdef int _position(self, int rank, long long version) noexcept nogil:
        """Return the position of a rank in the version's permuted list of ranks."""
        cdef long long length = self.cycle_length[rank]
        return self.cycles[
            self.cycle_begin[rank]
            + <int>((self.cycle_index[rank] - version % length + length) % length)
        ]
