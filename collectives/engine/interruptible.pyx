# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Calls that an exception, such as KeyboardInterrupt, interrupts.

The application gets its vector back; operations of all ranks continue in the background.
"""

from collectives.engine.operations cimport Operations
from collectives.engine.waiting cimport SECOND
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.protocols.contribution cimport X

cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef class Interruptible(Operations):
    """One rank's part in operations of all ranks, which continues if its caller is interrupted."""

    cdef void _abandon(self) noexcept nogil:
        """Stop using the application's vector in a call that an exception has interrupted."""
        self._lock_when_copied()
        self.driven.interrupt()
        self.driven.interrupted(self._drain())
        pthread_mutex_unlock(&self.lock)

    cdef void _lock_when_copied(self) noexcept nogil:
        """Take the lock, once no thread and no device accesses the application's buffer."""
        pthread_mutex_lock(&self.lock)
        while self.port.copying or not self.port.is_here():
            pthread_mutex_unlock(&self.lock)
            sched_yield()
            pthread_mutex_lock(&self.lock)

    cdef bint _drain(self) noexcept nogil:
        """Wait for messages that use the application's buffer; return whether all are complete.

        Running members complete them soon. A stopped one is waited for at most 1 s: then the call's
        vector is kept, and no change is computed relative to what is in it.
        """
        cdef long long end = now() + SECOND
        if self.driven.begun:
            self.exchange.divert()
        while (self.driven.begun and self.exchange.uses(self.vectors.of[X])
               and self.error == 0):
            if now() > end:
                return False
            self.exchange.progress()
            pthread_mutex_unlock(&self.lock)
            sched_yield()
            pthread_mutex_lock(&self.lock)
        return True
