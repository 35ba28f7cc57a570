from mpi4py.libmpi cimport MPI_Comm, MPI_Datatype, MPI_Request
from mpi4py.MPI cimport Comm

from collectives.memory.layout cimport Layout
from collectives.protocols.peers cimport PeerProtocol, Port

cdef struct Message:
    # A header, and the vector if it has one.
    char *memory
    bint holds_vector
    # Of one that comes: from whom, and whether all of it is there.
    int source
    bint complete
    # Of one that is sent: how many sends are under way, plus one while it is the last written.
    int uses
    Message *next

cdef struct MessageList:
    Message *first
    Message *last

cdef class Mailbox(Port):
    cdef readonly PeerProtocol protocol
    cdef readonly Layout layout
    cdef readonly long long progress_count, bytes_sent, nonfinite
    cdef int error
    cdef Comm communicator
    cdef MPI_Comm comm
    cdef MPI_Datatype line
    cdef int size
    # How often all ranks have begun anew: messages from before are of no use.
    cdef long long epoch
    # The model; what the application last got, and from its call on what it changed of that.
    cdef char *model
    cdef char *change
    cdef char **model_arrays
    cdef char **change_arrays
    cdef char **message_arrays
    # The application's arrays, NULL where it is in no call; whether its change counts; whether it
    # does not know what it last got, since an exception ended its call.
    cdef char **user
    cdef bint changed, unreturned
    # The model is still what the application last got.
    cdef bint untouched
    # Messages without and with a vector that are not in use; those on their way here, in the order
    # in which their sources sent them; and those that the protocol keeps.
    cdef MessageList free_short, free_long, coming, kept
    cdef Message *written
    # What is under way: requests, and each one's message.
    cdef MPI_Request *requests
    cdef Message **carried
    cdef int *indices
    cdef int count, room
    # For each rank: how many messages were sent to it; and at the end, how many it has sent here.
    cdef long long *posted
    cdef long long *expected
    cdef long long received
    cdef MPI_Request gather
    cdef bint ending

    cdef bint progress(self) noexcept nogil
    cdef bint _receive(self) noexcept nogil
    cdef void _test(self) noexcept nogil
    cdef void _deliver(self) noexcept nogil
    cdef void _open(self, Message *message) noexcept nogil
    cdef bint _is_first_of_its_source(self, Message *message) noexcept nogil
    cdef Message *_allocate_message(self, bint holds_vector) noexcept nogil
    cdef void _recycle(self, Message *message) noexcept nogil
    cdef Message *_kept_from(self, int source) noexcept nogil
    cdef bint _add_request(self, Message *message) noexcept nogil
    cdef void _send(self, Message *message, int destination) noexcept nogil
    cdef bint _begin_message(
        self, int kind, long long number, double weight, bint holds_vector) noexcept nogil
    cdef void _scale(self, char **to, char **source, double scale) noexcept nogil
    cdef void begin_call(self, char **user) noexcept nogil
    cdef void record_change(self, char **user) noexcept nogil
    cdef void publish_change(self, char **user) noexcept nogil
    cdef void go_on_from(self, char **user) noexcept nogil
    cdef void forget_user(self) noexcept nogil
    cdef void restart(self, char **model, long long calls) noexcept nogil
    cdef void end(self) noexcept nogil
    cdef bint is_over(self) noexcept nogil
    cdef void free_type(self) noexcept nogil
    cdef void _check(self, int rc) noexcept nogil
