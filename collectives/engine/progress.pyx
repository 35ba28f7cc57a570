"""The progress thread, which advances the collectives that no caller drives.

All that it knows of a collective is its lock, `progress()`, and when to poll it.
"""

import threading

from libc.string cimport memset

from collectives.engine.rhythm cimport LONGEST_PAUSE
from collectives.engine.served cimport Served
from collectives.exchange.clock cimport now, sleep
from collectives.exchange.mutex cimport (
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_trylock,
    pthread_mutex_unlock,
)
from collectives.memory.driver cimport note_own_thread
from collectives.recording.recorder cimport note_engine_thread

cdef extern from "<sched.h>" nogil:
    int sched_yield()
    unsigned int SCHED_OTHER

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int, unsigned long)
    int PR_SET_TIMERSLACK

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_sched_getattr, SYS_sched_setattr

cdef extern from "<unistd.h>" nogil:
    long syscall(long, ...)

cdef struct sched_attr:
    unsigned int size, policy
    unsigned long long flags
    int nice
    unsigned int priority
    unsigned long long runtime, deadline, period

cdef enum:
    # With work in flight: polls without a pause, and nanoseconds by which later pauses grow.
    BUSY_POLLS = 50
    BUSY_PAUSE = 200


cdef void set_slice(unsigned long long length) noexcept nogil:
    """Set this thread's scheduling slice, in nanoseconds; 0: the default.

    Linux 6.12 and later schedules a thread with a shorter slice earlier, and one that yields gives
    up at most one slice: without this, a caller that has yielded n times may not run for n times
    3 ms once others compute. An older kernel ignores the length.
    """
    cdef sched_attr attributes
    memset(&attributes, 0, sizeof(attributes))
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) == 0
            and attributes.policy == SCHED_OTHER):
        attributes.runtime = length
        syscall(SYS_sched_setattr, 0, &attributes, 0)


cdef void _ask_for_short_slices() noexcept nogil:
    """Make this thread run soon after it wakes, and sleep precisely: it needs little time."""
    set_slice(SLICE)
    prctl(PR_SET_TIMERSLACK, 1)


cdef class Stop:
    """Tells one progress thread to end."""


cdef class Engine:
    """The process's progress thread, which serves all its collectives."""

    def __init__(self):
        pthread_mutex_init(&self.lock, NULL)
        self.collectives = []

    def start(self, str mode):
        """Start the thread, unless it runs.

        Raises:
            RuntimeError: the system lets this process have no more threads.
        """
        cdef Stop stop = Stop()
        if self.thread is not None:
            return
        self.spinning = mode == "dedicated"
        thread = threading.Thread(
            target=self._serve, args=[stop], name="wagma-engine", daemon=True)
        thread.start()
        self.thread, self.stop = thread, stop

    def end(self):
        """End the thread, if it runs."""
        if self.thread is not None:
            thread, self.thread = self.thread, None
            self.stop.asked = True
            thread.join()

    def add(self, Served collective, str mode):
        """Serve a collective."""
        cdef void *pointer = <void *>collective
        collective.no_progress_thread = mode == "none"
        self.collectives.append(collective)
        # Release the GIL meanwhile: the thread that serves all collectives takes this lock.
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.served[self.count] = pointer
            self.count += 1
            pthread_mutex_unlock(&self.lock)

    def remove(self, Served collective):
        """Stop serving a closed collective."""
        cdef void *pointer = <void *>collective
        cdef int i, kept = 0
        with nogil:
            pthread_mutex_lock(&self.lock)
            for i in range(self.count):
                if self.served[i] != pointer:
                    self.served[kept] = self.served[i]
                    kept += 1
            self.count = kept
            pthread_mutex_unlock(&self.lock)
        self.collectives.remove(collective)

    def _serve(self, Stop stop):
        with nogil:
            _ask_for_short_slices()
            note_own_thread()
            note_engine_thread()
            self._loop(stop)

    cdef bint serve_once(self) noexcept nogil:
        """Advance each collective that no caller drives; return whether work is in flight."""
        cdef int i
        cdef bint busy = False
        pthread_mutex_lock(&self.lock)
        self.progress_count = 0
        self.pause = LONGEST_PAUSE
        for i in range(self.count):
            busy |= self._look_after(<Served>self.served[i])
        pthread_mutex_unlock(&self.lock)
        return busy

    cdef void _loop(self, Stop stop) noexcept nogil:
        cdef int polls = 0
        cdef bint busy
        cdef long long pause, progress_count = 0
        while not stop.asked:
            busy = self.serve_once()
            pause = self.pause
            if not busy or self.progress_count != progress_count:
                polls = 0
            progress_count = self.progress_count
            if self.spinning:
                # Let other threads have the lock, or this core.
                sched_yield()
                continue
            if busy:
                # The rank that it waits for may need this core.
                polls += 1
                pause = 0 if polls < BUSY_POLLS else min(polls * BUSY_PAUSE, LONGEST_PAUSE)
            if pause:
                sleep(pause)

    cdef bint _look_after(self, Served collective) noexcept nogil:
        """Advance a collective, unless a caller does; shorten the pause to what it allows."""
        cdef bint busy
        if collective.waiting_callers or pthread_mutex_trylock(&collective.lock) != 0:
            return False
        busy = not collective.closed and collective.progress()
        self.progress_count += collective.progressed()
        if collective.is_copying():
            busy = False  # each time that this thread wakes the copy takes tens of microseconds more
        else:
            self.pause = min(self.pause, collective.rhythm.pause(now()))
        pthread_mutex_unlock(&collective.lock)
        return busy


engine = Engine()
cdef void *the_engine = <void *>engine


cdef void serve_all_once() noexcept nogil:
    """Advance all collectives of this process that no caller drives."""
    (<Engine>the_engine).serve_once()


cdef int count_served() noexcept nogil:
    return (<Engine>the_engine).count


def all_served():
    """Return the collectives that are served."""
    return list(engine.collectives)
