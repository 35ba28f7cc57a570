from collectives.protocols.formed_groups cimport Group

cdef int BUFFERED, ALONE, BUFFER

cdef class GroupGenerator:
    cdef readonly int size, group_size, nodes, most, room, formed
    cdef readonly long long groups
    cdef readonly bint reuses
    cdef bint smart
    cdef long long threshold, random, back, most_requests
    cdef int filled, free_count
    cdef int[::1] node, left, late, members, bounds
    cdef int[::1] missing_at, free, buffer, untaken, taken_place
    cdef int[::1] idle, sorted, starts, heads
    cdef long long[::1] requests, asked_at, away, number_at, taken_number

    cdef int request(self, int rank, long long pauses) noexcept nogil
    cdef void pause(self, int rank, long long pauses, bint leaving) noexcept nogil
    cdef void lag(self, int rank) noexcept nogil
    cdef void forget(self, int rank) noexcept nogil
    cdef void restart(self) noexcept nogil
    cdef void write(self, int index, Group group) noexcept nogil
    cdef bint is_active(self, int rank) noexcept nogil
    cdef bint is_idle(self, int rank) noexcept nogil
    cdef void draw_group(self, int rank) noexcept nogil
    cdef void divide(self, int rank) noexcept nogil
    cdef void sort_by_node(self, int count) noexcept nogil
    cdef void divide_heads(self) noexcept nogil
    cdef void divide_nodes(self) noexcept nogil
    cdef void cut(self, int[::1] ranks, int begin, int end) noexcept nogil
    cdef int share(self, int count) noexcept nogil
    cdef void add(self, int rank) noexcept nogil
    cdef void end_group(self) noexcept nogil
    cdef void give(self) noexcept nogil
    cdef void take(self, int rank) noexcept nogil
    cdef void count(self, int rank) noexcept nogil
    cdef void make_up(self, int place) noexcept nogil
    cdef void credit(self, int rank) noexcept nogil
    cdef void shuffle(self, int[::1] values, int count) noexcept nogil
    cdef int draw(self, int count) noexcept nogil
