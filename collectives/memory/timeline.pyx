"""Tells which points a stream has reached, without calling the driver.

All functions of the driver, even queries, may block while another thread's launch waits for space
in a full queue, or allocates memory. A thread that other ranks wait for must not call them.
"""

from collectives.memory.driver cimport NOT_SUPPORTED, SUCCESS, Address, cu

cdef extern from *:
    """
    static unsigned load_number(const unsigned *number)
    {
        return __atomic_load_n(number, __ATOMIC_ACQUIRE);
    }
    """
    unsigned load_number(const unsigned *number) noexcept nogil


cdef class Timeline:
    """The points of one stream, numbered from 1; the stream writes their numbers to pinned memory.

    Once a number has arrived, all work queued before its point is complete, and what it has written
    is visible to the host. If the device fails, no number arrives: ask the driver.

    Args:
        context: the device's context.

    Raises:
        CudaError: there is no pinned memory left.
    """

    def __init__(self, Context context):
        self.memory = PinnedMemory(sizeof(unsigned), context)
        self.number = <unsigned *>self.memory.address
        self.number[0] = 0
        self.writes = cu.StreamWriteValue32 != NULL

    cdef int mark(self, Handle stream) noexcept nogil:
        """Queue the next point, which becomes `last`; return the driver's result.

        The context must be current.
        """
        cdef int result = NOT_SUPPORTED
        cdef unsigned number = <unsigned>(self.last + 1)
        if self.writes:
            result = cu.StreamWriteValue32(stream, <Address>self.number, number, 0)
            self.writes = result != NOT_SUPPORTED
        if not self.writes:
            result = cu.MemsetD32Async(<Address>self.number, number, 1, stream)
        if result == SUCCESS:
            self.last += 1
        return result

    cdef bint reached(self, long long point) noexcept nogil:
        """Return whether the stream has reached a point of the last 2³¹; point 0: always."""
        return <int>(load_number(self.number) - <unsigned>point) >= 0
