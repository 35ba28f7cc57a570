from collectives.engine.progress cimport Served
from collectives.memory.handover cimport Handover

cdef enum:
    SECOND = 1000000000
    # Nanoseconds after which a thread that waits looks for signals, stalls and failed devices.
    LOOK = 100000000

cdef struct Waiting:
    # When a caller began to wait, when it last saw progress, and when it looked for signals.
    long long began, progressed, looked
    # When it asked who is missing (0: not yet), and after how long it looks for a circle.
    long long asked, circles
    # When it last reported who is missing (0: not yet), and whether as a warning.
    long long said
    bint warned
    # When a protocol was last told that a caller waits for long (0: not yet).
    long long overdue

cdef class Waiter(Served):
    # An error code of MPI, or 0.
    cdef int error
    # Whether ranks and their progress threads outnumber the cores; whether averages then take so
    # long that a caller yields often.
    cdef bint oversubscribed, yields_often
    cdef long long waiting_ns

    cdef bint _reached(self, int goal) noexcept nogil
    cdef bint _is_in_vain(self, int goal) noexcept nogil
    cdef int _raise_failure(self, int goal) except -1
    cdef void _begin_waiting(self, int goal) noexcept nogil
    cdef void _end_waiting(self) noexcept nogil
    cdef int _look_for_stalls(self, int goal, Waiting *waiting, long long time) except -1
    cdef void _look_for_errors(self) noexcept nogil
    cdef long long _busy_ns(self) noexcept nogil
    cdef int _wait(self, int goal) except -1 nogil
    cdef int _wait_until(self, int goal) except -1 nogil
    cdef int _give_up(self, int goal) except -1 nogil
    cdef int _pause(self, int goal, Waiting *waiting) except -1 nogil
    cdef int _wait_for(self, Handover handover) except -1 nogil
    cdef void _serve_others(self) noexcept nogil
