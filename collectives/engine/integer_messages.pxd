from mpi4py.libmpi cimport MPI_Comm, MPI_Request, MPI_Status
from mpi4py.MPI cimport Comm

cdef class IntegerMessages:
    cdef Comm communicator
    cdef MPI_Comm comm
    cdef int tag, size, most, error
    # The last message that has come: from whom, and what.
    cdef int source, length
    cdef long long[::1] integers
    # The one that is being received; no other one is begun before it is there.
    cdef MPI_Request receive
    cdef MPI_Status status
    cdef bint receiving
    # Requests of messages to others, each with its memory, and how many are under way.
    cdef MPI_Request *sends
    cdef long long **spaces
    cdef int *indices
    cdef int room, under_way
    # For each rank: how many were sent to it; and at the end, how many it has sent here.
    cdef long long *posted
    cdef long long *expected
    cdef readonly long long received
    cdef MPI_Request gather
    cdef bint ending

    cdef void send(self, int destination, long long[::1] integers) noexcept nogil
    cdef int _find_room(self) noexcept nogil
    cdef bint take(self) noexcept nogil
    cdef void test(self) noexcept nogil
    cdef void end(self) noexcept nogil
    cdef bint is_over(self) noexcept nogil
    cdef void _check(self, int rc) noexcept nogil
