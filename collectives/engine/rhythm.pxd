cdef enum:
    LONGEST_PAUSE = 1000000

cdef class Rhythm:
    cdef long long last
    cdef double interval, deviation

    cdef void beat(self, long long time) noexcept nogil
    cdef long long pause(self, long long time) noexcept nogil
