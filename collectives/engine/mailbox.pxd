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
    # Number of restarts of all ranks: messages of earlier epochs are dropped.
    cdef long long epoch
    # The application's arrays, NULL outside calls. `changed`: its change counts. `unreturned`: it
    # has not got the last model, since an exception ended its call.
    cdef char **user
    cdef bint changed, unreturned
    # `same`: what the application last got is the model as it is, and stored nowhere else.
    # `unrecorded`: the arrays with its change, not recorded yet (NULL: it is); `against_model`:
    # `same` was true when they were given.
    cdef bint same, against_model
    cdef char **unrecorded
    # The application got its last model through `vectors.handover`.
    cdef bint got_there
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
