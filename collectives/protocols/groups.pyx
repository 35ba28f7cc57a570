"""`topology.Shuffle` on C arrays, so that the engine finds a version's group without the GIL."""

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from collectives.topology import shuffle


cdef class Groups:
    """The groups of one rank.

    Args:
        rank, size: this rank, and the number of ranks.
        group_size, fixed: see `topology.shuffle`.
        period: versions from one whose group is all ranks to the next; 0: there is none.
        array_periods: of each array, as `settings.periods_of` returns them.
    """

    def __init__(self, int rank, int size, int group_size, bint fixed, long long period,
                 array_periods):
        cdef int each
        cdef int position, place = 0
        cdef int *base = <int *>calloc(8 * size, sizeof(int))
        if base == NULL:
            raise MemoryError
        self.rank, self.size, self.period = rank, size, period
        self.cycles = base
        self.cycle_begin, self.cycle_length = base + size, base + 2 * size
        self.cycle_index, self.chunk_begin = base + 3 * size, base + 4 * size
        self.chunk_end, self.members = base + 5 * size, base + 6 * size
        self.everyone = base + 7 * size
        self.arrays = len(array_periods)
        self.array_periods = <long long *>calloc(self.arrays, sizeof(long long))
        if self.array_periods == NULL:
            raise MemoryError
        for each in range(self.arrays):
            self.array_periods[each] = array_periods[each]
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
        free(self.array_periods)

    cdef int find(self, long long version) noexcept nogil:
        """Fill `members` with this rank's group of the version; return the rank's index in it."""
        cdef int position = self._position(self.rank, version)
        self.count = self.of(self.rank, version, self.members)
        return self.rank if self.is_of_all(version) else position - self.chunk_begin[position]

    cdef int of(self, int rank, long long version, int *members) noexcept nogil:
        """Fill `members` with a rank's group of the version; return the number of members.

        This is `topology.Shuffle.members`, but for the versions of all ranks.
        """
        cdef int position = self._position(rank, version)
        cdef int first = self.chunk_begin[position]
        cdef int each
        if self.is_of_all(version):
            memcpy(members, self.everyone, self.size * sizeof(int))
            return self.size
        for each in range(first, self.chunk_end[position]):
            members[each - first] = self.cycles[
                self.cycle_begin[each]
                + <int>((self.cycle_index[each] + version) % self.cycle_length[each])
            ]
        return self.chunk_end[position] - first

    cdef int size_of(self, int rank, long long version) noexcept nogil:
        """Return the number of members of a rank's group of the version."""
        cdef int position
        if self.is_of_all(version):
            return self.size
        position = self._position(rank, version)
        return self.chunk_end[position] - self.chunk_begin[position]

    cdef int first(self, int rank, long long version) noexcept nogil:
        """Return the first position of a rank's group in the version's permuted list of ranks."""
        return 0 if self.is_of_all(version) else self.chunk_begin[self._position(rank, version)]

    @cython.cdivision(False)
    cdef bint is_of_all(self, long long version) noexcept nogil:
        """Return whether a version's group is all ranks, as one in every period is."""
        return self.period > 0 and (version + 1) % self.period == 0

    @cython.cdivision(False)
    cdef int averaged(self, long long version) noexcept nogil:
        """Return how many of the arrays, from the first on, a version averages."""
        cdef int count = self.arrays
        if self.is_of_all(version):
            return count
        while count > 0 and (
                self.array_periods[count - 1] == 0
                or (version + 1) % self.array_periods[count - 1] != 0):
            count -= 1
        return count

    cdef int _position(self, int rank, long long version) noexcept nogil:
        """Return the position of a rank in the version's permuted list of ranks."""
        cdef long long length = self.cycle_length[rank]
        return self.cycles[
            self.cycle_begin[rank]
            + <int>((self.cycle_index[rank] - version % length + length) % length)
        ]
