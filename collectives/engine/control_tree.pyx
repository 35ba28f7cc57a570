"""The control tree: short messages from each rank to all, along the dimensions of a butterfly.

It carries failures and the end of messages (FIN); subclasses add others.
"""

from libc.string cimport memcpy, strncpy
from mpi4py.libmpi cimport (
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_STATUSES_IGNORE,
    MPI_UNDEFINED,
    MPI_Isend,
    MPI_Recv_init,
    MPI_Request_free,
    MPI_Start,
    MPI_Test,
    MPI_Testsome,
)
from mpi4py.MPI cimport Comm

from collectives.engine.tags cimport TREE_TAG
from collectives.exchange.clock cimport now
from collectives.exchange.return_codes cimport check
from collectives.protocols.all_ranks cimport AllRanksProtocol, TreePort
from collectives.recording.recorder cimport LEARNED, record, recording

from collectives.topology import activation_peers

cdef enum:
    # The first integer of a message, if it is not the number of a version: the sender sends no
    # more; a rank has failed, whose number and text follow.
    FIN = -1
    FAILED = -2


cdef class ControlTree(TreePort):
    """One rank's part in the control tree, for a protocol that decides which messages are due.

    Args:
        comm: a communicator that only this tree uses.
        protocol: is told of the messages that arrive.
    """

    def __init__(self, Comm comm, AllRanksProtocol protocol):
        cdef int k
        self.comm = comm.ob_mpi
        self.protocol = protocol
        self.newest = -1
        protocol.attach(self)
        for k in range(MAX_DIMENSIONS):
            self.receives[k] = MPI_REQUEST_NULL
            self.sends[k] = MPI_REQUEST_NULL
        for k, (destination, source) in enumerate(activation_peers(comm.rank, comm.size)):
            self.destination[k] = destination
            self.source[k] = source

    cdef void listen(self) noexcept nogil:
        """Post the receives, once all ranks have reached this point; the MPI mutex is held."""
        cdef int k
        for k in range(self.protocol.dimensions):
            check(&self.error, MPI_Recv_init(
                self.received[k], MESSAGE, MPI_LONG_LONG, self.source[k], TREE_TAG, self.comm,
                &self.receives[k]))
            check(&self.error, MPI_Start(&self.receives[k]))

    cdef void free(self) noexcept nogil:
        """Free the receives; the MPI mutex is held."""
        cdef int k
        for k in range(self.protocol.dimensions):
            MPI_Request_free(&self.receives[k])

    cdef void receive(self) noexcept nogil:
        """Receive the messages that have arrived; the MPI mutex is held."""
        cdef int indices[MAX_DIMENSIONS]
        cdef int count = 0
        cdef int i, k
        if self.protocol.dimensions == 0:
            return
        check(&self.error, MPI_Testsome(
            self.protocol.dimensions, self.receives, &count, indices, MPI_STATUSES_IGNORE))
        if count == MPI_UNDEFINED or self.error != 0:  # they may have ended in an error
            return
        for i in range(count):
            k = indices[i]
            if self.received[k][0] == FIN:
                self.protocol.fin(k)
                continue
            if self.received[k][0] == FAILED:
                if self.protocol.failed < 0:
                    memcpy(self.failure, &self.received[k][2], TEXT)
                self.protocol.notice(<int>self.received[k][1], k)
            else:
                if self._is_news(self.received[k][0], self.received[k][1]) and recording():
                    record(LEARNED, self.number, now(), 0,
                           self.received[k][0] + self.protocol.base, self.source[k], 0)
                self._deliver(k, self.received[k][0], self.received[k][1])
            check(&self.error, MPI_Start(&self.receives[k]))

    cdef void send_due(self) noexcept nogil:
        """Send the messages that are due, one at a time on each dimension.

        The MPI mutex is held.
        """
        cdef int k, done
        if self.protocol.due_on() == 0:
            return
        for k in range(self.protocol.dimensions):
            while self.protocol.due_on() >> k & 1:
                check(&self.error, MPI_Test(&self.sends[k], &done, MPI_STATUS_IGNORE))
                if not done:
                    break
                self.protocol.send_on(k)

    cdef bint all_sent(self) noexcept nogil:
        """Return whether all messages have been sent; the MPI mutex is held."""
        cdef int k, done
        cdef bint all = True
        for k in range(self.protocol.dimensions):
            check(&self.error, MPI_Test(&self.sends[k], &done, MPI_STATUS_IGNORE))
            all = all and done
        return all

    cdef void fail(self, int rank, const char *text) noexcept nogil:
        """Begin to tell all ranks that this one has failed."""
        if self.protocol.failed < 0:
            strncpy(self.failure, text, TEXT - 1)
            self.protocol.notice(rank, -1)

    cdef void _deliver(self, int k, long long number, long long detail) noexcept nogil:
        """Tell the protocol of a subclass's message."""

    cdef void send_failure(self, int dimension, int rank) noexcept nogil:
        self._send(dimension, FAILED, rank)

    cdef void send_fin(self, int dimension) noexcept nogil:
        self._send(dimension, FIN, 0)

    cdef void _send(self, int k, long long number, long long detail) noexcept nogil:
        self._is_news(number, detail)
        self.sent[k][0] = number
        self.sent[k][1] = detail
        if number == FAILED:
            memcpy(&self.sent[k][2], self.failure, TEXT)
        check(&self.error, MPI_Isend(
            self.sent[k], MESSAGE if number == FAILED else 2, MPI_LONG_LONG, self.destination[k],
            TREE_TAG, self.comm, &self.sends[k]))

    cdef bint _is_news(self, long long version, long long ops) noexcept nogil:
        """Return whether this is the first message, to this rank or from it, of a version."""
        if version < 0 or ops < self.newest_ops or (
                ops == self.newest_ops and version <= self.newest):
            return False
        self.newest, self.newest_ops = version, ops
        return True
