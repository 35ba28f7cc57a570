from collectives.exchange.mutex cimport pthread_mutex_t
from collectives.memory.driver cimport Handle, PinnedMemory
from collectives.memory.handover cimport Handover

cdef extern from "<semaphore.h>" nogil:
    ctypedef struct sem_t:
        pass

cdef class Mirror(Handover):
    cdef PinnedMemory memory
    # The host's arrays, and their addresses.
    cdef readonly list arrays
    cdef char **host
    # The stream of copies to the device.
    cdef Handle back
    # Blocks: their bytes and number; the point at which the first one has arrived.
    cdef Py_ssize_t block
    cdef int blocks
    cdef long long first_point
    # The bytes up to which the vector is final, and up to which it has been given back; `returning`
    # guards the second.
    cdef Py_ssize_t final, given_back
    cdef pthread_mutex_t returning
    # The thread that gives blocks back, woken when one is `due`, until it is `ending`.
    cdef object thread
    cdef sem_t due
    cdef bint ending
    # A vector's copy to the host is pending.
    cdef bint fetching

    cdef int _copy_block(self, Py_ssize_t low, Py_ssize_t high) except -1 nogil
    cdef void _return_final(self) noexcept nogil
    cdef int _return_rest(self) except -1 nogil
    cdef int _copy_back(self, Py_ssize_t end) noexcept nogil
