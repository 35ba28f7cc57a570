from collectives.protocols.peers cimport PeerProtocol

cdef int SHARE

cdef class PushSumProtocol(PeerProtocol):
    cdef int[::1] destinations, sources, first_destination, first_source
    cdef int phases, phase
    cdef public double weight
    cdef double initial
