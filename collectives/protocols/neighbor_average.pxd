from collectives.protocols.peers cimport PeerProtocol

cdef int MODEL, CLOCK

cdef class NeighborAverageProtocol(PeerProtocol):
    cdef int[::1] sources, destinations
    cdef double[::1] shares
    cdef double own
    cdef long long[::1] ticks
    cdef int rounds, round

    cdef void distribute(self) noexcept nogil
    cdef void tick(self, int number) noexcept nogil
