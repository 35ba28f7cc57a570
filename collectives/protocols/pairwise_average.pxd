from collectives.protocols.peers cimport PeerProtocol

cdef int ASK, GRANT, REFUSE, HALF
cdef int FREE, ASKING, GRANTED

cdef class PairwiseAverageProtocol(PeerProtocol):
    cdef int[::1] neighbors, waiting
    cdef long long random
    cdef public int state, peer, attempts
    cdef public long long refusals, missed
    cdef int first_waiting, count_waiting

    cdef void answer(self, int rank, int kind) noexcept nogil
    cdef int draw(self, int count) noexcept nogil
