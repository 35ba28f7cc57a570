from mpi4py.libmpi cimport MPI_Comm, MPI_Request
from mpi4py.MPI cimport Comm

cdef class CountedMessages:
    # Number of messages received.
    cdef readonly long long received
    # This rank sends nothing more.
    cdef readonly bint ending
    cdef int error
    cdef Comm communicator
    cdef MPI_Comm comm
    cdef int size
    # For each rank: how many messages were sent to it; and at the end, how many it has sent here.
    cdef long long *posted
    cdef long long *expected
    cdef MPI_Request gather

    cdef void end(self) noexcept nogil
    cdef bint is_over(self) noexcept nogil
