from collectives.engine.messages cimport Message
from collectives.engine.peer_vectors cimport PeerVectors, Step, What
from collectives.engine.transfers cimport Transfers
from collectives.memory.layout cimport Layout
from collectives.protocols.peer_rank cimport PeerRankPort, PeerRankProtocol

cdef class Mailbox(PeerRankPort):
    cdef readonly PeerRankProtocol deciding
    cdef readonly Layout layout
    cdef readonly long long progress_count, bytes_sent
    # Of the collective, in a timeline.
    cdef int number
    cdef Transfers messages
    cdef PeerVectors vectors
    # The application's arrays; the protocol decides when they are used.
    cdef char **user
    # Whether an arriving vector's change is finite, as its device has checked, or UNKNOWN.
    cdef int finite
    # What `post` sends: a message, and the step that sends the vector following it.
    cdef Message *written
    cdef Step *sending

    cdef void begin(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef bint advance(self) noexcept nogil
    cdef void _deliver(self) noexcept nogil
    cdef void _open(self, Message *message) noexcept nogil
    cdef void _write(
        self, int kind, long long number, double weight, char *vector) noexcept nogil
    cdef void _head(
        self, Message *message, int kind, long long number, double weight, int holds
    ) noexcept nogil
    cdef void _sent(self, Message *message, int destination, long long began) noexcept nogil
    cdef void _note(self, What what, double share, char **user) noexcept nogil
    cdef void _do_inside(self) noexcept nogil
    cdef bint is_idle(self) noexcept nogil
    cdef int error(self) noexcept nogil
    cdef void read_model(self, char **user) noexcept nogil
    cdef void restart(self, char **model, long long calls) noexcept nogil
    cdef bint is_over(self) noexcept nogil
