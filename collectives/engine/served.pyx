"""What the progress thread, waiting callers and their calls ask of a collective."""

from collectives.engine.rhythm cimport Rhythm
from collectives.exchange.mutex cimport pthread_mutex_init

cdef enum:
    # Further collectives have this number, too.
    LAST_NUMBER = 255

# How many collectives this process has made.
cdef int made = 0


cdef class Served:
    """An object that the progress thread serves; the thread that holds its lock advances it."""

    def __cinit__(self, *arguments, **options):
        pthread_mutex_init(&self.lock, NULL)
        self.rhythm = Rhythm()
        global made
        self.number = min(made, LAST_NUMBER)
        made += 1

    cdef bint progress(self) noexcept nogil:
        """Advance as far as possible without waiting; return whether work is in flight."""
        return False

    cdef bint is_in_memory(self) noexcept nogil:
        """Return whether what is waited for happens in memory that ranks share."""
        return False

    cdef void progress_in_memory(self) noexcept nogil:
        """Advance without a look at messages."""

    cdef long long advanced(self) noexcept nogil:
        """Return a number that changes with what brings callers nearer to their ends."""
        return self.progressed()

    cdef long long progressed(self) noexcept nogil:
        """Return a count that grows with any progress."""
        return 0

    cdef long long busy_ns(self) noexcept nogil:
        """Return the nanoseconds spent on advancing work."""
        return 0

    cdef bint is_copying(self) noexcept nogil:
        """Return whether a call copies or checks its vector, and advances the collective then."""
        return False

    # What a waiting caller asks

    cdef bint reached(self, int goal) noexcept nogil:
        """Return whether the goal of a caller is reached."""
        return True

    cdef bint is_in_vain(self, int goal) noexcept nogil:
        """Return whether the goal will never be reached."""
        return False

    cdef int raise_failure(self, int goal) except -1:
        """Raise the error that keeps the goal from being reached."""
        return 0

    cdef void begin_waiting(self) noexcept nogil:
        """Note that a caller begins to wait; the lock is held."""

    cdef void end_waiting(self) noexcept nogil:
        """Note that a caller has ended waiting; the lock is held."""

    cdef int look_for_stalls(self, Waiting *waiting, long long time) except -1:
        """Report who is missing, and end the job at its limit; the lock is not held."""
        return 0

    cdef void look_for_errors(self) noexcept nogil:
        """Ask a device that is waited for whether it has failed; the lock is not held."""

    # What a call asks; the lock is held

    cdef int begin(self, int what) except -1 nogil:
        """Begin the operation or call that the application requests."""
        return 0

    cdef int give(self, int what, char **arrays, double weight) except -1 nogil:
        """Begin a call or operation with these arrays, if any."""
        return 0
