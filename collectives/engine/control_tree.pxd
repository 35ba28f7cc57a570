from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives.protocols.all_ranks cimport AllRanksProtocol, TreePort

cdef enum:
    MAX_DIMENSIONS = 32
    # Integers of the longest message, and bytes of a failure's text in it.
    MESSAGE = 32
    TEXT = 8 * (MESSAGE - 2)

cdef class ControlTree(TreePort):
    cdef MPI_Comm comm
    cdef AllRanksProtocol protocol
    cdef int error
    # For the timeline: the collective's number; the newest version of which there was a message, and
    # the number of operations before it.
    cdef int number
    cdef long long newest, newest_ops
    cdef int destination[MAX_DIMENSIONS]
    cdef int source[MAX_DIMENSIONS]
    cdef MPI_Request receives[MAX_DIMENSIONS]
    cdef MPI_Request sends[MAX_DIMENSIONS]
    cdef long long received[MAX_DIMENSIONS][MESSAGE]
    cdef long long sent[MAX_DIMENSIONS][MESSAGE]
    cdef char failure[TEXT]

    cdef void listen(self) noexcept nogil
    cdef void free(self) noexcept nogil
    cdef void receive(self) noexcept nogil
    cdef void send_due(self) noexcept nogil
    cdef bint all_sent(self) noexcept nogil
    cdef void fail(self, int rank, const char *text) noexcept nogil
    cdef void _deliver(self, int k, long long number, long long detail) noexcept nogil
    cdef void _send(self, int k, long long number, long long detail) noexcept nogil
    cdef bint _is_news(self, long long version, long long ops) noexcept nogil
