from mpi4py.libmpi cimport MPI_Datatype, MPI_Message, MPI_Request

from collectives.engine.counted_messages cimport CountedMessages
from collectives.engine.node_queues cimport NodeQueues
from collectives.memory.layout cimport Layout

cdef enum:
    # The fields of a message's header, eight bytes each.
    KIND
    NUMBER
    EPOCH
    WEIGHT
    # NOTHING, or a vector: inside the message or following it, and whether it is the model.
    HOLDS

cdef enum:
    NOTHING
    VECTOR
    MODEL

cdef enum Room:
    # What memory is for: a header; a header and a vector; a few blocks of a vector, in turns.
    SHORT
    WHOLE
    TURNS

cdef struct Message:
    char *memory
    Room room
    # Of a received message: its source, and whether all of it has arrived.
    int source
    bint complete
    # Of a sent message: number of pending sends, plus one while it may be sent again.
    int uses
    Message *next

cdef struct MessageList:
    Message *first
    Message *last

cdef struct Held:
    # A message that the queue to its destination has had no room for yet.
    Message *message
    int destination

cdef inline long long *header(Message *message) noexcept nogil:
    return <long long *>message.memory

cdef inline double *weight_in(Message *message) noexcept nogil:
    return <double *>message.memory + WEIGHT

cdef class Messages(CountedMessages):
    cdef readonly Layout layout
    # Whether vectors are sent inside their messages.
    cdef readonly bint inside
    # Counts blocks sent or received, and rounds of steps.
    cdef readonly long long moved
    cdef MPI_Datatype line
    # By `Room`: bytes, number allocated, messages not in use. `coming`: incoming messages, in the
    # order in which their sources sent them.
    cdef Py_ssize_t bytes[3]
    cdef int made[3]
    cdef MessageList pools[3]
    cdef MessageList coming
    # By `Room`, for messages that arrive when no memory is left; how many of them are short.
    cdef MessageList reserves[3]
    cdef int reserved
    # A message that is to be received next, if any, with its source and length.
    cdef MPI_Message arriving
    cdef int source, lines
    # Pending requests, and the message of each.
    cdef MPI_Request *requests
    cdef Message **carried
    cdef int *indices
    cdef int count, room
    # Queues to and from ranks of the node; messages that wait for room there, how many these are,
    # and for how many there is memory.
    cdef NodeQueues queues
    cdef Held *held
    cdef int held_count, held_room

    cdef void progress(self) noexcept nogil
    cdef void _move_blocks(self) noexcept nogil
    cdef bint uses_mpi(self) noexcept nogil
    cdef void _read_queues(self) noexcept nogil
    cdef bint _hold(self, Message *message, int destination) noexcept nogil
    cdef bint _is_held(self, int destination, int end) noexcept nogil
    cdef void _write_held(self) noexcept nogil
    cdef bint _receive(self) noexcept nogil
    cdef void _test(self) noexcept nogil
    cdef Message *arrived(self, long long epoch) noexcept nogil
    cdef bint _is_first_of_its_source(self, Message *message) noexcept nogil
    cdef Message *allocate(self, Room room) noexcept nogil
    cdef void recycle(self, Message *message) noexcept nogil
    cdef void release(self, Message *message) noexcept nogil
    cdef Message *_allocate_to_receive(self, Room room) noexcept nogil
    cdef int _allocate_reserve(self) except -1
    cdef bint _has_room(self, bint receiving) noexcept nogil
    cdef void _add_request(self, Message *message) noexcept nogil
    cdef bint post(self, Message *message, int destination) noexcept nogil
    cdef bint is_busy(self) noexcept nogil
    cdef void free_type(self) noexcept nogil
