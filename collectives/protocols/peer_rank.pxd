from collectives.protocols.peers cimport LEAVE, PeerProtocol, Port

cdef class PeerRankPort(Port):
    cdef void record(self, bint against_model) noexcept nogil
    cdef void save(self) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void keep(self) noexcept nogil
    cdef void replace(self) noexcept nogil
    cdef void keep_model(self, double scale) noexcept nogil
    cdef void hold(self) noexcept nogil
    cdef void load(self) noexcept nogil
    cdef bint adopt(self) noexcept nogil
    cdef bint is_change_finite(self, bint against_model) noexcept nogil
    cdef bint is_checked(self) noexcept nogil
    cdef bint knows_change(self, bint bounded) noexcept nogil
    cdef bint is_here(self) noexcept nogil
    cdef bint is_lost(self) noexcept nogil
    cdef bint takes_whole(self) noexcept nogil
    cdef bint is_pending(self) noexcept nogil
    cdef bint answers(self) noexcept nogil

cdef class PeerRankProtocol(Port):
    cdef PeerRankPort port
    cdef readonly PeerProtocol exchanging
    cdef readonly bint present, same, changed, unrecorded, against_model, unreturned, bounded, began
    cdef readonly long long epoch, nonfinite

    cdef void attach(self, PeerProtocol exchanging)
    cdef void keep_apart(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef void await_vector(self) noexcept nogil
    cdef bint begin_awaited(self) noexcept nogil
    cdef void take_change(self) noexcept nogil
    cdef void publish_change(self) noexcept nogil
    cdef void hand_in(self) noexcept nogil
    cdef bint join(self) noexcept nogil
    cdef void caught_up(self) noexcept nogil
    cdef void go_on_from(self) noexcept nogil
    cdef void returned_checked(self) noexcept nogil
    cdef void restart(self, long long calls) noexcept nogil
    cdef void interrupt(self) noexcept nogil
    cdef bint counts(self, int kind, long long epoch) noexcept nogil
    cdef bint takes_ahead(self) noexcept nogil
    cdef bint takes_all(self) noexcept nogil
    cdef bint has_answered(self) noexcept nogil
