cdef class Groups:
    cdef readonly int rank, size
    # The versions from one whose group is all ranks to the next; 0: there is none.
    cdef long long period
    # Of each array, the versions from one that averages it to the next; 0: only those of all ranks.
    cdef long long *array_periods
    cdef int arrays
    # The members of the group last found, and all ranks.
    cdef int count
    cdef int *members
    cdef int *everyone
    # topology.Shuffle, for each position: the cycle's place in `cycles`, its length, the position's
    # index in it, and the chunk's bounds.
    cdef int *cycle_begin
    cdef int *cycle_length
    cdef int *cycle_index
    cdef int *cycles
    cdef int *chunk_begin
    cdef int *chunk_end

    cdef int find(self, long long version) noexcept nogil
    cdef int of(self, int rank, long long version, int *members) noexcept nogil
    cdef bint is_of_all(self, long long version) noexcept nogil
    cdef int averaged(self, long long version) noexcept nogil
    cdef int size_of(self, int rank, long long version) noexcept nogil
    cdef int first(self, int rank, long long version) noexcept nogil
    cdef int _position(self, int rank, long long version) noexcept nogil
