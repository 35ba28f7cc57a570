cimport cython

from collectives.protocols.contribution cimport RESULT, SNAPSHOT, Vectors

cdef long long PERIODS

@cython.final
cdef class Lease:
    cdef Vectors vectors
    cdef readonly long long limit
    cdef readonly bint held, expired

    cdef void begin(self, long long sync_period) noexcept nogil
    cdef bint expires(self, long long age) noexcept nogil
    cdef void expire(self, bint keeps_base) noexcept nogil
    cdef void resume(self) noexcept nogil
    cdef void renew(self) noexcept nogil
    cdef void end(self) noexcept nogil
