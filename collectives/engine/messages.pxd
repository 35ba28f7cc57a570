from mpi4py.libmpi cimport MPI_Datatype, MPI_Request

from collectives.engine.counted_messages cimport CountedMessages
from collectives.memory.layout cimport Layout

cdef enum:
    # What is in a message's header, eight bytes each.
    KIND
    NUMBER
    EPOCH
    WEIGHT
    # Whether there is a vector, in it or behind it.
    HOLDS

cdef enum Room:
    # What memory is for: a header; a vector behind it; a few blocks of a vector, in turns.
    SHORT
    WHOLE
    TURNS

cdef struct Message:
    char *memory
    Room room
    # Of one that comes: from whom, and whether all of it is there.
    int source
    bint complete
    # Of one that is sent: how many sends are under way, plus one while it may be sent again.
    int uses
    Message *next

cdef struct MessageList:
    Message *first
    Message *last

cdef inline long long *header(Message *message) noexcept nogil:
    return <long long *>message.memory

cdef inline double *weight_in(Message *message) noexcept nogil:
    return <double *>message.memory + WEIGHT

cdef class Messages(CountedMessages):
    cdef readonly Layout layout
    # Whether vectors are in their messages.
    cdef readonly bint inside
    # How often anything has moved.
    cdef readonly long long moved
    cdef MPI_Datatype line
    # By what memory is for: its bytes, how often there is such, and what is not in use. Messages on
    # their way here, in the order in which their sources sent them.
    cdef Py_ssize_t bytes[3]
    cdef int made[3]
    cdef MessageList pools[3]
    cdef MessageList coming
    # Messages under way: requests, and each one's message.
    cdef MPI_Request *requests
    cdef Message **carried
    cdef int *indices
    cdef int count, room

    cdef void progress(self) noexcept nogil
    cdef void _move_blocks(self) noexcept nogil
    cdef bint _receive(self) noexcept nogil
    cdef void _test(self) noexcept nogil
    cdef Message *arrived(self, long long epoch) noexcept nogil
    cdef bint _is_first_of_its_source(self, Message *message) noexcept nogil
    cdef Message *allocate(self, Room room) noexcept nogil
    cdef void recycle(self, Message *message) noexcept nogil
    cdef void release(self, Message *message) noexcept nogil
    cdef bint _add_request(self, Message *message) noexcept nogil
    cdef void post(self, Message *message, int destination) noexcept nogil
    cdef bint is_busy(self) noexcept nogil
    cdef void free_type(self) noexcept nogil
