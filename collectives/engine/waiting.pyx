"""Waiting: the caller drives its collective itself, and lets others run meanwhile."""

from cpython.exc cimport PyErr_CheckSignals
from libc.string cimport memset

from collectives.engine.progress cimport SLICE, serve_all_once, set_slice
from collectives.engine.served cimport LOOK, SECOND, Served, Waiting
from collectives.exchange.clock cimport now, sleep
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.handover cimport Handover
from collectives.recording.recorder cimport WAIT, WAITING, note, note_if_long

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "_pause.h" nogil:
    void pause_briefly()

cdef enum:
    SPIN_BEFORE_SLEEP = 500000
    LONGEST_WAIT = 500000
    # Looks at shared memory after progress, before the core is left to others: about as long as a
    # present rank takes to answer, and too short to delay a progress thread that needs the core.
    SPINS = 200
    # And with progress: messages may come all the time.
    MOST_SPINS = 2000
    # Polls in shared memory for one that looks at messages too, which cost more and come rarely.
    POLLS_TO_MESSAGES = 4


cdef class Waiter:
    """How the callers of a collective wait for their goals.

    Args:
        cores_per_rank: cores that the ranks of this node may use, for each of them.
        long_vectors: whether averages take so long that a caller then yields often.
    """

    def __init__(self, double cores_per_rank, bint long_vectors):
        # Progress threads sleep while their rank's caller waits.
        self.spins = cores_per_rank >= 1
        self.oversubscribed = cores_per_rank < 2
        self.yields_often = self.oversubscribed and long_vectors

    cdef int wait(self, Served collective, int goal) except -1 nogil:
        """Drive the collective until the goal is reached; the lock is held on entry and exit.

        In shared memory it spins briefly after any progress, if callers have a core each. Between
        polls it yields if ranks and progress threads outnumber cores, and sleeps longer the longer
        it has waited. About ten times a second it looks for signals, stalls and failed devices.
        """
        cdef Waiting waiting
        cdef long long advanced, progress_count, busy, end
        cdef int polls = 0
        cdef bint spins = self.spins
        if collective.reached(goal):
            return 0
        collective.progress()
        if collective.reached(goal):
            return 0
        busy = collective.busy_ns()
        memset(&waiting, 0, sizeof(waiting))
        waiting.began = now()
        waiting.progressed = waiting.began
        waiting.looked = waiting.began
        waiting.circles = SECOND
        collective.waiting_callers += 1
        collective.begin_waiting()
        if self.yields_often:
            set_slice(SLICE)
        try:
            while not collective.reached(goal):
                if collective.is_in_vain(goal):
                    give_up(collective, goal)
                progress_count, advanced = collective.progressed(), collective.advanced()
                if spins and self._spin(collective, goal):
                    break
                self._pause(collective, &waiting)
                polls += 1
                if polls % POLLS_TO_MESSAGES and collective.is_in_memory():
                    collective.progress_in_memory()
                else:
                    collective.progress()
                spins = False
                if collective.progressed() != progress_count:
                    spins = self.spins
                if collective.advanced() != advanced:
                    waiting.progressed = now()
        finally:
            if self.yields_often:
                set_slice(0)
            collective.end_waiting()
            collective.waiting_callers -= 1
            end, busy = now(), collective.busy_ns() - busy
            self.waiting_ns += end - waiting.began - busy
            note_if_long(WAIT, collective.number, waiting.began, end, goal, busy)
        return 0

    cdef int wait_until(self, Served collective, int goal) except -1 nogil:
        """Wait until the goal is reached; the lock is not held on entry and exit."""
        pthread_mutex_lock(&collective.lock)
        try:
            self.wait(collective, goal)
        finally:
            pthread_mutex_unlock(&collective.lock)
        return 0

    cdef bint _spin(self, Served collective, int goal) noexcept nogil:
        """Advance in shared memory as long as others are about to; return whether that suffices.
        """
        cdef long long progress_count = collective.progressed()
        cdef int i = 0, left = MOST_SPINS
        while i < SPINS and left > 0 and collective.is_in_memory():
            pause_briefly()
            collective.progress_in_memory()
            if collective.reached(goal):
                return True
            i += 1
            left -= 1
            if collective.progressed() != progress_count:
                progress_count = collective.progressed()
                i = 0
        return False

    cdef int _pause(self, Served collective, Waiting *waiting) except -1 nogil:
        """Let other threads and ranks run between two polls of a waiting caller."""
        cdef long long time = now()
        cdef long long waited = time - waiting.progressed
        cdef bint look = time - waiting.looked > LOOK
        if waited < SPIN_BEFORE_SLEEP and not self.oversubscribed and not look:
            return 0
        if look:
            note(WAITING, collective.number, waiting.began, time)
            collective.waiting_callers -= 1  # as in `give_up`
        pthread_mutex_unlock(&collective.lock)
        try:
            if look:
                waiting.looked = time
                collective.look_for_errors()
                with gil:
                    PyErr_CheckSignals()
                    collective.look_for_stalls(waiting, time)
            serve_others(collective)
            if waited < SPIN_BEFORE_SLEEP:
                sched_yield()
            else:
                sleep(min(waited >> 4, LONGEST_WAIT))
        finally:
            pthread_mutex_lock(&collective.lock)
            if look:
                collective.waiting_callers += 1
        return 0


cdef int give_up(Served collective, int goal) except -1 nogil:
    """Raise the error that keeps this goal from being reached.

    Getting the GIL may take long: the progress thread drives the collective meanwhile.
    """
    collective.waiting_callers -= 1
    pthread_mutex_unlock(&collective.lock)
    try:
        with gil:
            collective.raise_failure(goal)
    finally:
        pthread_mutex_lock(&collective.lock)
        collective.waiting_callers += 1
    return 0


cdef int wait_for(Served collective, Handover handover) except -1 nogil:
    """Wait until a vector has arrived from its device; this rank is passive meanwhile."""
    cdef long long began = now(), time = began, looked = began
    while not handover.arrived():
        if time - looked > LOOK:
            looked = time
            handover.look_for_errors()
            with gil:
                PyErr_CheckSignals()
        serve_others(collective)
        if time - began < SPIN_BEFORE_SLEEP:
            sched_yield()
        else:
            sleep(min((time - began) >> 4, LONGEST_WAIT))
        time = now()
    return 0


cdef void serve_others(Served collective) noexcept nogil:
    """If there is no progress thread, advance the process's other collectives too."""
    if collective.no_progress_thread:
        serve_all_once()
