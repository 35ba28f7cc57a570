from collectives.engine.served cimport Served
from collectives.exchange.mutex cimport pthread_mutex_t

cdef enum:
    MAX_COLLECTIVES = 256
    # Nanoseconds for which a thread that yields often runs at a time.
    SLICE = 100000

cdef class Stop:
    cdef bint asked

cdef class Engine:
    cdef void *served[MAX_COLLECTIVES]
    cdef readonly int count
    cdef pthread_mutex_t lock
    cdef bint spinning
    # Of the last round: the sum of the progress counts, and how long the thread may sleep.
    cdef long long progress_count, pause
    cdef readonly list collectives  # keeps those served alive
    cdef object thread
    cdef Stop stop

    cdef bint serve_once(self) noexcept nogil
    cdef void _loop(self, Stop stop) noexcept nogil
    cdef bint _look_after(self, Served collective) noexcept nogil

cdef void set_slice(unsigned long long length) noexcept nogil
cdef void serve_all_once() noexcept nogil
cdef int count_served() noexcept nogil
