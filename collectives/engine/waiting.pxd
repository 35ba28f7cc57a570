from collectives.engine.served cimport Served, Waiting
from collectives.memory.handover cimport Handover

cdef class Waiter:
    # Whether callers have a core each; whether ranks and their progress threads outnumber the cores;
    # whether averages then take so long that a caller yields often.
    cdef bint spins, oversubscribed, yields_often
    # Nanoseconds in which callers only waited.
    cdef long long waiting_ns

    cdef int wait(self, Served collective, int goal) except -1 nogil
    cdef int wait_until(self, Served collective, int goal) except -1 nogil
    cdef bint _spin(self, Served collective, int goal) noexcept nogil
    cdef int _pause(self, Served collective, Waiting *waiting) except -1 nogil

cdef int give_up(Served collective, int goal) except -1 nogil
cdef int wait_for(Served collective, Handover handover) except -1 nogil
cdef void serve_others(Served collective) noexcept nogil
