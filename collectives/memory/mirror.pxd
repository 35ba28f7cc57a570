from collectives.memory.driver cimport Handle, PinnedMemory
from collectives.memory.handover cimport Handover

cdef class Mirror(Handover):
    cdef PinnedMemory memory
    # The host's arrays, and their addresses.
    cdef readonly list arrays
    cdef char **host
    # The stream of copies to the device.
    cdef Handle back
    # Of each block: the event that it has arrived on the host.
    cdef Handle *fetched
    # Blocks: their bytes and number; how many of a vector's blocks are known to have arrived, and
    # up to which byte of the vector it has been given back.
    cdef Py_ssize_t block
    cdef int blocks, here
    cdef Py_ssize_t given_back
    # A vector's copy to the host is pending.
    cdef bint fetching

    cdef int _copy_block(self, Py_ssize_t low, Py_ssize_t high) except -1 nogil
    cdef int _copy_back(self, Py_ssize_t end) noexcept nogil
