from collectives.protocols.formed_groups cimport Group
from collectives.protocols.paces cimport NEVER, UNKNOWN, Paces

cdef double weigh(
    long long[::1] iterations, int count, double alpha, bint nearest, double[::1] weights
) noexcept nogil

cdef void weigh_each(
    long long[::1] iterations, int count, double alpha, double[::1] weights
) noexcept nogil

cdef class PartialReduceController:
    cdef readonly int size, group_size, history, waiting
    cdef bint dynamic, nearest, each
    cdef double alpha
    cdef int[::1] queue, ready, left
    cdef long long[::1] iterations, pauses
    cdef long long over, paused_at, connected_until, held_until, holds_from
    cdef int[::1] late
    cdef long long[::1] since
    cdef Paces paces
    cdef bint frozen
    cdef public bint judges
    cdef int[::1] window, sizes, parents, linked
    cdef int home, dropped, added
    cdef int[::1] chosen
    cdef long long[::1] member_iterations
    cdef double[::1] shares
    cdef readonly Group group
    cdef readonly long long newest, number
    cdef readonly double initial
    cdef public long long now
    cdef readonly long long due, formed, alone, bridges, holds, in_vain, released, absences, recording
    cdef readonly bint held
    cdef readonly double[::1] met
    cdef readonly long long[::1] taken

    cdef void signal(
        self, int rank, long long iteration, long long pauses, bint fresh) noexcept nogil
    cdef void restart_times(self) noexcept nogil
    cdef bint withdraw(
        self, int rank, long long iteration, long long pauses, bint leaves) noexcept nogil
    cdef bint is_there(self, int rank) noexcept nogil
    cdef bint form(self) noexcept nogil
    cdef int count_there(self) noexcept nogil
    cdef bint drop_late(self, bint all_others) noexcept nogil
    cdef void choose_first(self, int count) noexcept nogil
    cdef bint release(self, int rank) noexcept nogil
    cdef bint choose(self, int count) noexcept nogil
    cdef bint is_worth_waiting(self, int count) noexcept nogil
    cdef bint is_frozen(self) noexcept nogil
    cdef int root_of(self, int rank) noexcept nogil
    cdef int component_of(self, int rank) noexcept nogil
    cdef void close_group(self, int count) noexcept nogil
    cdef void record(self, int count) noexcept nogil
