"""Short lists of integers, sent from one rank's engine to another's.

Those of one sender arrive in the order of sending. The thread that calls these methods holds the
collective's lock.
"""

import array

from libc.stdlib cimport free
from libc.string cimport memcpy
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE,
    MPI_ERR_COUNT,
    MPI_ERR_INTERN,
    MPI_LONG_LONG,
    MPI_MESSAGE_NULL,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_STATUSES_IGNORE,
    MPI_UNDEFINED,
    MPI_Get_count,
    MPI_Improbe,
    MPI_Imrecv,
    MPI_Isend,
    MPI_Message,
    MPI_Test,
    MPI_Testsome,
)
from mpi4py.MPI cimport Comm

from collectives.engine.counted_messages cimport CountedMessages
from collectives.engine.tags cimport MESSAGE_TAG
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.exchange.return_codes cimport check
from collectives.memory.allocation cimport resized, zeroed


cdef class IntegerMessages(CountedMessages):
    """One rank's messages.

    Args:
        comm: a communicator.
        most: the largest number of integers in a message.
    """

    def __init__(self, Comm comm, int most):
        CountedMessages.__init__(self, comm)
        self.most = most
        # The last message that has arrived, of which the first `length` integers count.
        self.integers = array.array("q", [0]) * most
        self.receive = MPI_REQUEST_NULL
        if self._find_room() < 0:
            raise MemoryError

    def __dealloc__(self):
        cdef int i
        for i in range(self.room):
            free(self.spaces[i])
        free(self.spaces)
        free(self.sends)
        free(self.indices)

    cdef void send(self, int destination, long long[::1] integers) noexcept nogil:
        """Send a list; after `end` drop it, because no rank receives any more."""
        cdef int length = <int>integers.shape[0]
        cdef int i
        if self.ending:
            return
        if length > self.most or length < 1:
            self.error = MPI_ERR_COUNT
            return
        i = self._find_room()
        if i < 0:
            # The receiver would wait for it forever, so this rank cannot even leave.
            self.error = MPI_ERR_INTERN
            return
        memcpy(self.spaces[i], &integers[0], length * sizeof(long long))
        pthread_mutex_lock(&mpi_mutex)
        check(&self.error, MPI_Isend(
            self.spaces[i], length, MPI_LONG_LONG, destination, MESSAGE_TAG, self.comm,
            &self.sends[i]))
        pthread_mutex_unlock(&mpi_mutex)
        self.under_way += 1
        self.posted[destination] += 1

    cdef int _find_room(self) noexcept nogil:
        """Return the index of a free request; −1 if there is no memory for another one."""
        cdef int i, first = self.room
        cdef int room = 2 * first if first > 0 else 2 * self.size + 8
        cdef void *memory
        for i in range(first):
            if self.sends[i] == MPI_REQUEST_NULL:
                return i
        memory = resized(self.spaces, room * sizeof(long long *))
        if memory == NULL:
            return -1
        self.spaces = <long long **>memory
        memory = resized(self.sends, room * sizeof(MPI_Request))
        if memory == NULL:
            return -1
        self.sends = <MPI_Request *>memory
        memory = resized(self.indices, room * sizeof(int))
        if memory == NULL:
            return -1
        self.indices = <int *>memory
        while self.room < room:
            self.spaces[self.room] = <long long *>zeroed(self.most, sizeof(long long))
            if self.spaces[self.room] == NULL:
                return -1
            self.sends[self.room] = MPI_REQUEST_NULL
            self.room += 1
        return first

    cdef bint take(self) noexcept nogil:
        """Receive the next message, if it has arrived, into `source`, `integers` and `length`.

        Return whether there was one.
        """
        cdef MPI_Message arriving = MPI_MESSAGE_NULL
        cdef int found = 0, done = 0
        pthread_mutex_lock(&mpi_mutex)
        if not self.receiving:
            check(&self.error, MPI_Improbe(
                MPI_ANY_SOURCE, MESSAGE_TAG, self.comm, &found, &arriving, &self.status))
            if found:
                self.source = self.status.MPI_SOURCE
                check(&self.error, MPI_Get_count(&self.status, MPI_LONG_LONG, &self.length))
                check(&self.error, MPI_Imrecv(
                    &self.integers[0], self.length, MPI_LONG_LONG, &arriving, &self.receive))
                self.receiving = True
        if self.receiving:
            check(&self.error, MPI_Test(&self.receive, &done, MPI_STATUS_IGNORE))
        self.receiving = self.receiving and not done
        pthread_mutex_unlock(&mpi_mutex)
        self.received += done
        return done

    cdef void test(self) noexcept nogil:
        """Test which messages have been sent."""
        cdef int done = 0
        if self.under_way == 0:
            return
        pthread_mutex_lock(&mpi_mutex)
        check(&self.error, MPI_Testsome(
            self.room, self.sends, &done, self.indices, MPI_STATUSES_IGNORE))
        pthread_mutex_unlock(&mpi_mutex)
        if done != MPI_UNDEFINED:
            self.under_way -= done

    cdef bint is_over(self) noexcept nogil:
        return CountedMessages.is_over(self) and self.under_way == 0
