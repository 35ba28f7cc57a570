from collectives.memory.driver cimport Handle, PinnedMemory
from collectives.memory.handover cimport Handover

cdef class Mirror(Handover):
    cdef PinnedMemory memory
    # The host's arrays, and where they begin.
    cdef readonly list arrays
    cdef char **host
    # What copies to the device are in.
    cdef Handle back
    # Each block is on the host.
    cdef Handle *fetched
    # Blocks: their bytes, and how many there are; how many of a vector's are known to be here, and
    # how far it has been given back, in the bytes of a vector.
    cdef Py_ssize_t block
    cdef int blocks, here
    cdef Py_ssize_t given_back
    # A vector is on its way to the host.
    cdef bint fetching

    cdef int _copy_block(self, Py_ssize_t low, Py_ssize_t high) except -1 nogil
    cdef int _copy_back(self, Py_ssize_t end) noexcept nogil
