from collectives.engine.rhythm cimport Rhythm
from collectives.exchange.mutex cimport pthread_mutex_t

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

cdef class Served:
    cdef readonly int rank, size
    # Among the collectives of this process, in the timeline.
    cdef readonly int number
    cdef readonly bint closed
    cdef pthread_mutex_t lock
    cdef Rhythm rhythm
    cdef int waiting_callers
    # There is no progress thread: calls advance all collectives of the process.
    cdef bint no_progress_thread

    cdef bint progress(self) noexcept nogil
    cdef bint is_in_memory(self) noexcept nogil
    cdef void progress_in_memory(self) noexcept nogil
    cdef long long advanced(self) noexcept nogil
    cdef long long progressed(self) noexcept nogil
    cdef long long busy_ns(self) noexcept nogil
    cdef bint is_copying(self) noexcept nogil
    cdef bint reached(self, int goal) noexcept nogil
    cdef bint is_in_vain(self, int goal) noexcept nogil
    cdef int raise_failure(self, int goal) except -1
    cdef void begin_waiting(self) noexcept nogil
    cdef void end_waiting(self) noexcept nogil
    cdef int look_for_stalls(self, Waiting *waiting, long long time) except -1
    cdef void look_for_errors(self) noexcept nogil
    cdef int begin(self, int what) except -1 nogil
    cdef int give(self, int what, char **arrays, double weight) except -1 nogil
