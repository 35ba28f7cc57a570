# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Waiting: the caller drives its collective itself, and lets others run meanwhile."""

from cpython.exc cimport PyErr_CheckSignals
from libc.string cimport memset

from collectives.engine.progress cimport SLICE, Served, serve_all_once, set_slice
from collectives.exchange.clock cimport now, sleep
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.handover cimport Handover

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    SPIN_BEFORE_SLEEP = 500000
    LONGEST_WAIT = 500000


cdef class Waiter(Served):
    """An object whose callers can wait; subclasses define what they wait for."""

    # What subclasses override

    cdef bint _reached(self, int goal) noexcept nogil:
        """Return whether the goal of a caller is reached."""
        return True

    cdef bint _is_in_vain(self, int goal) noexcept nogil:
        """Return whether the goal will never be reached."""
        return False

    cdef int _raise_failure(self, int goal) except -1:
        """Raise why the goal will never be reached."""
        return 0

    cdef void _begin_waiting(self, int goal) noexcept nogil:
        """Note that a caller begins to wait; the lock is held."""

    cdef void _end_waiting(self) noexcept nogil:
        """Note that a caller has ended waiting; the lock is held."""

    cdef int _look_for_stalls(self, int goal, Waiting *waiting, long long time) except -1:
        """Report who is missing, and end the job at its limit; the lock is not held."""
        return 0

    cdef void _look_for_errors(self) noexcept nogil:
        """Ask a device that is waited for whether it has failed; the lock is not held."""

    cdef long long _busy_ns(self) noexcept nogil:
        """Return the nanoseconds spent on advancing work."""
        return 0

    # Waiting

    cdef int _wait(self, int goal) except -1 nogil:
        """Drive the collective until the goal is reached; the lock is held on entry and exit.

        Between polls it yields where ranks outnumber cores, and the longer it has waited, the
        longer it sleeps. About ten times a second it looks for signals, stalls and failed devices.
        """
        cdef Waiting waiting
        cdef long long progress_count, busy
        if self._reached(goal):
            return 0
        self.progress()
        if self._reached(goal):
            return 0
        busy = self._busy_ns()
        memset(&waiting, 0, sizeof(waiting))
        waiting.began = now()
        waiting.progressed = waiting.began
        waiting.looked = waiting.began
        waiting.circles = SECOND
        self.waiting_callers += 1
        self._begin_waiting(goal)
        if self.yields_often:
            set_slice(SLICE)
        try:
            while not self._reached(goal):
                if self._is_in_vain(goal):
                    self._give_up(goal)
                progress_count = self.progressed()
                self._pause(goal, &waiting)
                self.progress()
                if self.progressed() != progress_count:
                    waiting.progressed = now()
        finally:
            if self.yields_often:
                set_slice(0)
            self._end_waiting()
            self.waiting_callers -= 1
            self.waiting_ns += now() - waiting.began - (self._busy_ns() - busy)
        return 0

    cdef int _wait_until(self, int goal) except -1 nogil:
        """Wait until the goal is reached; the lock is not held on entry and exit."""
        pthread_mutex_lock(&self.lock)
        try:
            self._wait(goal)
        finally:
            pthread_mutex_unlock(&self.lock)
        return 0

    cdef int _give_up(self, int goal) except -1 nogil:
        """Raise why waiting is in vain.

        Getting the GIL may take long: the progress thread drives in the meantime.
        """
        self.waiting_callers -= 1
        pthread_mutex_unlock(&self.lock)
        try:
            with gil:
                self._raise_failure(goal)
        finally:
            pthread_mutex_lock(&self.lock)
            self.waiting_callers += 1
        return 0

    cdef int _pause(self, int goal, Waiting *waiting) except -1 nogil:
        """Let other threads and ranks run between two polls of a waiting caller."""
        cdef long long time = now()
        cdef long long waited = time - waiting.progressed
        cdef bint look = time - waiting.looked > LOOK
        if waited < SPIN_BEFORE_SLEEP and not self.oversubscribed and not look:
            return 0
        if look:
            self.waiting_callers -= 1  # as in `_give_up`
        pthread_mutex_unlock(&self.lock)
        try:
            if look:
                waiting.looked = time
                self._look_for_errors()
                with gil:
                    PyErr_CheckSignals()
                    self._look_for_stalls(goal, waiting, time)
            self._serve_others()
            if waited < SPIN_BEFORE_SLEEP:
                sched_yield()
            else:
                sleep(min(waited >> 4, LONGEST_WAIT))
        finally:
            pthread_mutex_lock(&self.lock)
            if look:
                self.waiting_callers += 1
        return 0

    def wait_for(self, Handover handover):
        """Wait until a vector has arrived from its device; this rank is passive meanwhile."""
        with nogil:
            self._wait_for(handover)
        handover.check()

    cdef int _wait_for(self, Handover handover) except -1 nogil:
        cdef long long began = now(), time = began, looked = began
        while not handover.arrived():
            if time - looked > LOOK:
                looked = time
                handover.look_for_errors()
                with gil:
                    PyErr_CheckSignals()
            self._serve_others()
            if time - began < SPIN_BEFORE_SLEEP:
                sched_yield()
            else:
                sleep(min((time - began) >> 4, LONGEST_WAIT))
            time = now()
        return 0

    cdef void _serve_others(self) noexcept nogil:
        """Where there is no progress thread, advance the process's other collectives too."""
        if self.no_progress_thread:
            serve_all_once()
