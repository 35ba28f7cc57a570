from collectives.protocols.peers cimport PeerProtocol

cdef int UPDATE, TOKEN, ACK

cdef class QueuedNeighborAverageProtocol(PeerProtocol):
    cdef int max_gap, needed, staleness, max_skip, skip_trigger, slots
    cdef bint tokens, bounded, weighted, acknowledges, serial, sent
    cdef int[::1] is_source, is_destination, queued, used
    cdef long long[::1] newest, entered, acknowledged
    cdef public long long dropped, withheld

    cdef void send(self) noexcept nogil
    cdef void enqueue(self, int i, long long iteration) noexcept nogil
    cdef void drop(self, int i) noexcept nogil
    cdef bint has_update(self, int i, long long iteration) noexcept nogil
    cdef bint has_enough(self, long long iteration) noexcept nogil
    cdef long long weight_of(self, int i, long long iteration) noexcept nogil
    cdef void reduce(self, long long iteration) noexcept nogil
    cdef bint may_enter(self, long long iteration) noexcept nogil
    cdef bint lacks_token(self, int i, long long iteration) noexcept nogil
    cdef long long next_iteration(self) noexcept nogil
    cdef void forget(self, long long iteration) noexcept nogil
    cdef void enter(self, long long iteration) noexcept nogil
    cdef void tell_sources(self, int kind, long long number) noexcept nogil
    cdef bint lacks_update(self, int i) noexcept nogil
    cdef bint lacks_answer(self, int i) noexcept nogil
