from mpi4py.libmpi cimport MPI_Request, MPI_Status

from collectives.engine.counted_messages cimport CountedMessages

cdef class IntegerMessages(CountedMessages):
    cdef int most
    # The last message that has arrived: its source, length and integers.
    cdef int source, length
    cdef long long[::1] integers
    # The message that is being received; no other receive is begun before it has arrived.
    cdef MPI_Request receive
    cdef MPI_Status status
    cdef bint receiving
    # Requests of messages to others, each with its memory, and how many are pending.
    cdef MPI_Request *sends
    cdef long long **spaces
    cdef int *indices
    cdef int room, under_way

    cdef void send(self, int destination, long long[::1] integers) noexcept nogil
    cdef int _find_room(self) noexcept nogil
    cdef bint take(self) noexcept nogil
    cdef void test(self) noexcept nogil
