from collectives.engine.operations cimport Operations

cdef class Interruptible(Operations):
    cdef void _abandon(self) noexcept nogil
    cdef void _lock_when_copied(self) noexcept nogil
    cdef bint _drain(self) noexcept nogil
