"""Messages between ranks that are counted, so that each rank knows when all have arrived."""

from libc.stdlib cimport free
from mpi4py.libmpi cimport (
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_Ialltoall,
    MPI_Test,
)
from mpi4py.MPI cimport Comm

from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.exchange.return_codes cimport check
from collectives.memory.allocation cimport zeroed


cdef class CountedMessages:
    """One rank's messages; a subclass sends, receives and counts them.

    Args:
        comm: a communicator.
    """

    def __init__(self, Comm comm):
        self.communicator = comm
        self.comm = comm.ob_mpi
        self.size = comm.Get_size()
        self.gather = MPI_REQUEST_NULL
        self.posted = <long long *>zeroed(2 * self.size, sizeof(long long))
        if self.posted == NULL:
            raise MemoryError
        self.expected = self.posted + self.size

    def __dealloc__(self):
        free(self.posted)

    cdef void end(self) noexcept nogil:
        """Send nothing more; begin to gather how many messages each rank sent here; collective."""
        self.ending = True
        pthread_mutex_lock(&mpi_mutex)
        check(&self.error, MPI_Ialltoall(
            self.posted, 1, MPI_LONG_LONG, self.expected, 1, MPI_LONG_LONG, self.comm, &self.gather))
        pthread_mutex_unlock(&mpi_mutex)

    cdef bint is_over(self) noexcept nogil:
        """Return whether everything sent to this rank has been received."""
        cdef long long sent = 0
        cdef int rank, done = 0
        pthread_mutex_lock(&mpi_mutex)
        check(&self.error, MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        pthread_mutex_unlock(&mpi_mutex)
        if not done:
            return False
        for rank in range(self.size):
            sent += self.expected[rank]
        return self.received == sent
