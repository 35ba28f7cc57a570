from collectives.engine.messages cimport Message
from collectives.engine.peer_vectors cimport PeerVectors, Step, What
from collectives.engine.transfers cimport Transfers
from collectives.memory.layout cimport Layout
from collectives.protocols.peers cimport PeerProtocol, Port

cdef class Mailbox(Port):
    cdef readonly PeerProtocol protocol
    cdef readonly Layout layout
    cdef readonly long long progress_count, bytes_sent, nonfinite
    cdef Transfers messages
    cdef PeerVectors vectors
    # How often all ranks have begun anew: messages from before are of no use.
    cdef long long epoch
    # The application's arrays, NULL where it is in no call; whether its change counts; whether it
    # does not know what it last got, since an exception ended its call.
    cdef char **user
    cdef bint changed, unreturned
    # What the application last got is the model as it is, and nowhere else; or it was that, and
    # what it has changed is in these arrays, and not recorded yet (NULL: it is).
    cdef bint same, against_model
    cdef char **given
    # What the application last got is what a call gave back in `vectors.handover`.
    cdef bint got_there
    # What `post` sends: a message, and the step that sends the vector behind it.
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
        self, Message *message, int kind, long long number, double weight, bint holds
    ) noexcept nogil
    cdef void _note(self, What what, double share, char **user) noexcept nogil
    cdef void _keep_apart(self) noexcept nogil
    cdef void _do_inside(self) noexcept nogil
    cdef bint is_idle(self) noexcept nogil
    cdef bint has_answered(self) noexcept nogil
    cdef int error(self) noexcept nogil
    cdef void begin_call(self, char **user, int finite=*) noexcept nogil
    cdef void record_change(self, char **user, int finite=*) noexcept nogil
    cdef void publish_change(self, char **user) noexcept nogil
    cdef void go_on_from(self, char **user) noexcept nogil
    cdef void forget_user(self) noexcept nogil
    cdef void read_model(self, char **user) noexcept nogil
    cdef void restart(self, char **model, long long calls) noexcept nogil
    cdef bint is_over(self) noexcept nogil
