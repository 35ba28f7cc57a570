"""Vectors that the device averages in place."""

from collectives.memory.device_queue cimport DeviceQueue
from collectives.memory.driver cimport SUCCESS, check, cu, enter, leave
from collectives.memory.layout cimport DeviceVector, Layout

cdef extern from "<unistd.h>" nogil:
    int getpid()


cdef class InPlace(Handover):
    """The device averages the vector in place: passes over `arrays` are in the device's queue.

    The queue also has passes over passive contributions, so it must not wait for the application's
    stream. The vector is therefore checked in a separate stream, and passes over it are queued once
    the host has seen that the check is complete.

    Args:
        layout, addresses: see `Handover`.
        queue: the device's queue, which the layout's space uses.
    """

    def __init__(self, Layout layout, addresses, DeviceQueue queue):
        Handover.__init__(self, layout, addresses)
        self.queue = queue

    @property
    def arrays(self):
        """The vector, for the engine."""
        return DeviceVector([self.device[i] for i in range(self.layout.count)])

    cdef int _begin(self) except -1 nogil:
        return self._check_finite()

    def withdraw(self):
        cdef int mode
        if self.unchecked and enter(self.current, &mode) == SUCCESS:
            cu.StreamWaitEvent(self.stream, self.taken, 0)
            leave(mode)

    def give_back(self, bint bounds=False):
        cdef int mode
        self.check()
        self.queue.check()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            with nogil:
                self.queue.begun()  # so that the progress thread need not
                self._return(self.queue.stream)
        finally:
            leave(mode)
        self.kept = [self.kept.pop()]

    def forget(self):
        self.give_back()

    def close(self):
        """Wait for the queue, as long as a vector may be in use."""
        cdef int mode
        if self.current == NULL or self.pid != getpid():
            return
        if enter(self.current, &mode) == SUCCESS:
            with nogil:
                cu.StreamSynchronize(self.out)
            leave(mode)
        self.queue.close()
        Handover.close(self)
