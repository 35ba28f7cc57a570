"""Messages from one rank to another: a header, followed by a vector if that is short.

Between ranks of one node they are in queues that these share, else they are MPI's.
"""

from libc.stdlib cimport free
from libc.string cimport memset
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE,
    MPI_BYTE,
    MPI_ERR_NO_MEM,
    MPI_MESSAGE_NULL,
    MPI_REQUEST_NULL,
    MPI_STATUSES_IGNORE,
    MPI_UNDEFINED,
    MPI_Get_count,
    MPI_Improbe,
    MPI_Imrecv,
    MPI_Isend,
    MPI_Status,
    MPI_Testsome,
    MPI_Type_commit,
    MPI_Type_contiguous,
    MPI_Type_free,
)
from mpi4py.MPI cimport Comm

from collectives.engine.counted_messages cimport CountedMessages
from collectives.engine.node_queues cimport NodeQueues
from collectives.engine.tags cimport MESSAGE_TAG
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.exchange.return_codes cimport check
from collectives.memory.allocation cimport LINE, resized, try_to_allocate, zeroed
from collectives.memory.layout cimport HEADER, Layout

cdef enum:
    # The most receives begun in one poll, so that a fast rank's messages do not delay others'.
    MOST_AT_ONCE = 16
    # Requests that only receives may use.
    KEPT = 2
    # Bytes of the longest vector that is sent inside its message.
    LONGEST_INSIDE = 65536


cdef void append(MessageList *messages, Message *message) noexcept nogil:
    message.next = NULL
    if messages.first == NULL:
        messages.first = message
    else:
        messages.last.next = message
    messages.last = message


cdef void remove(MessageList *messages, Message *message) noexcept nogil:
    cdef Message *before = NULL
    cdef Message *each = messages.first
    while each != message:
        before = each
        each = each.next
    if before == NULL:
        messages.first = message.next
    else:
        before.next = message.next
    if messages.last == message:
        messages.last = before


cdef void free_all(MessageList *messages) noexcept nogil:
    cdef Message *message = messages.first
    cdef Message *following
    while message != NULL:
        following = message.next
        free(message.memory)
        free(message)
        message = following
    messages.first = NULL


cdef class Messages(CountedMessages):
    """This rank's messages to and from others, for the thread that holds the collective's lock.

    Args:
        comm: a communicator that only these messages use.
        layout: the vectors' layout.
        inside: whether long vectors are sent inside their messages too, the same on all ranks.
        ranks: those of this node, sorted.
        sharing: whether to share memory with these, the same on all ranks.
    """

    def __init__(self, Comm comm, Layout layout, bint inside, ranks, bint sharing):
        CountedMessages.__init__(self, comm)
        self.layout = layout
        self.inside = inside or layout.size - HEADER <= LONGEST_INSIDE
        self.queues = NodeQueues(
            comm.Get_rank(), self.size, ranks, layout.size if self.inside else HEADER, layout.size,
            sharing)
        self.bytes[<int>SHORT] = HEADER
        self.bytes[<int>WHOLE] = layout.size
        check(&self.error, MPI_Type_contiguous(LINE, MPI_BYTE, &self.line))
        check(&self.error, MPI_Type_commit(&self.line))
        self.arriving = MPI_MESSAGE_NULL
        self._allocate_reserve()

    def __dealloc__(self):
        cdef int room
        for room in range(3):
            free_all(&self.pools[room])
            free_all(&self.reserves[room])
        free_all(&self.coming)
        free(self.requests)
        free(self.carried)
        free(self.indices)
        free(self.held)

    cdef int _allocate_reserve(self) except -1:
        """Allocate messages with which to receive when no memory is left.

        Several short ones from each rank may be in transit. A vector inside its message is used at
        once, so one of these is enough.
        """
        cdef Message *message
        cdef int i
        self.reserved = 2 * self.size + 8
        for i in range(self.reserved + self.inside):
            message = self.allocate(SHORT if i < self.reserved else WHOLE)
            if message == NULL:
                raise MemoryError
            append(&self.reserves[<int>message.room], message)
        if not self._has_room(False):
            raise MemoryError
        return 0

    # Progress

    cdef void progress(self) noexcept nogil:
        """Send and receive as far as possible without waiting."""
        cdef int received
        if self.queues.in_use:
            self._write_held()
            self._read_queues()
        if not self.uses_mpi():
            return
        pthread_mutex_lock(&mpi_mutex)
        for received in range(MOST_AT_ONCE):
            if not self._receive():
                break
        self._test()
        self._move_blocks()
        pthread_mutex_unlock(&mpi_mutex)

    cdef void _move_blocks(self) noexcept nogil:
        """Send and receive the blocks that follow messages; the MPI mutex is held."""

    cdef bint uses_mpi(self) noexcept nogil:
        """Return whether a message to or from this rank may be MPI's."""
        return not self.queues.everywhere or self.count > 0

    cdef void _read_queues(self) noexcept nogil:
        """Receive the messages of this node's ranks."""
        cdef int i, received, source
        cdef Py_ssize_t length
        cdef Message *message
        for i in range(self.queues.count):
            source = self.queues.others[i]
            for received in range(MOST_AT_ONCE):
                length = self.queues.next(source)
                if length == 0:
                    break
                message = self._allocate_to_receive(WHOLE if length > HEADER else SHORT)
                if message == NULL:
                    return
                message.source = source
                message.complete = True
                self.queues.read(source, message.memory, length)
                append(&self.coming, message)

    cdef bint _receive(self) noexcept nogil:
        """Begin to receive a message; return whether one had come; the MPI mutex is held."""
        cdef MPI_Status status
        cdef Message *message
        cdef int found = 0
        if self.arriving == MPI_MESSAGE_NULL:
            check(&self.error, MPI_Improbe(
                MPI_ANY_SOURCE, MESSAGE_TAG, self.comm, &found, &self.arriving, &status))
            if not found:
                return False
            self.source = status.MPI_SOURCE
            check(&self.error, MPI_Get_count(&status, self.line, &self.lines))
        if not self._has_room(True):
            return False
        message = self._allocate_to_receive(WHOLE if self.lines > 1 else SHORT)
        if message == NULL:
            return False
        self._add_request(message)
        message.source = self.source
        message.complete = False
        append(&self.coming, message)
        check(&self.error, MPI_Imrecv(
            message.memory, self.lines, self.line, &self.arriving, &self.requests[self.count - 1]))
        return True

    cdef Message *_allocate_to_receive(self, Room room) noexcept nogil:
        """Return memory for a message that arrives; NULL: there is none until another is used."""
        cdef Message *message = self.allocate(room)
        if message == NULL:
            message = self.reserves[<int>room].first
            if message != NULL:
                remove(&self.reserves[<int>room], message)
        return message

    cdef void _test(self) noexcept nogil:
        """Test which messages have been sent or received; the MPI mutex is held."""
        cdef int done = 0, i, kept = 0
        cdef Message *message
        if self.count == 0:
            return
        check(&self.error, MPI_Testsome(
            self.count, self.requests, &done, self.indices, MPI_STATUSES_IGNORE))
        if done == MPI_UNDEFINED or done == 0:
            return
        for i in range(done):
            message = self.carried[self.indices[i]]
            if message.uses > 0:
                self.release(message)
            else:
                message.complete = True
        for i in range(self.count):
            if self.requests[i] != MPI_REQUEST_NULL:
                self.requests[kept] = self.requests[i]
                self.carried[kept] = self.carried[i]
                kept += 1
        self.count = kept

    # Messages

    cdef Message *arrived(self, long long epoch) noexcept nogil:
        """Return a message that has arrived, in each source's order; NULL: there is none.

        Messages of a later epoch wait for that epoch.
        """
        cdef Message *message = self.coming.first
        while message != NULL:
            if (message.complete and (header(message)[EPOCH] <= epoch or self.ending)
                    and self._is_first_of_its_source(message)):
                remove(&self.coming, message)
                self.received += 1
                return message
            message = message.next
        return NULL

    cdef bint _is_first_of_its_source(self, Message *message) noexcept nogil:
        cdef Message *each = self.coming.first
        while each.source != message.source:
            each = each.next
        return each == message

    cdef Message *allocate(self, Room room) noexcept nogil:
        """Return a message with memory of this kind; NULL, and set an error, if there is none."""
        cdef Message *message = self.pools[<int>room].first
        cdef Py_ssize_t size = self.bytes[<int>room]
        if message != NULL:
            remove(&self.pools[<int>room], message)
            return message
        message = <Message *>zeroed(1, sizeof(Message))
        if message != NULL:
            message.room = room
            message.memory = try_to_allocate(size)
            if message.memory != NULL:
                self.made[<int>room] += 1
                if room == SHORT or self.inside:
                    # Padding between arrays is sent too.
                    memset(message.memory, 0, size)
                return message
            free(message)
        self.error = MPI_ERR_NO_MEM
        return NULL

    cdef void recycle(self, Message *message) noexcept nogil:
        message.uses = 0
        append(&self.pools[<int>message.room], message)

    cdef void release(self, Message *message) noexcept nogil:
        """End one use of a message; recycle it after the last."""
        message.uses -= 1
        if message.uses == 0:
            self.recycle(message)

    cdef bint _has_room(self, bint receiving) noexcept nogil:
        """Return whether another message can be in flight; set an error if memory is missing.

        A message to receive finds room at the latest once others have been received.
        """
        cdef int room
        cdef void *requests
        cdef void *carried
        cdef void *indices
        if self.count + KEPT >= self.room:
            room = max(2 * self.room, 16)
            requests = resized(self.requests, room * sizeof(MPI_Request))
            if requests != NULL:
                self.requests = <MPI_Request *>requests
            carried = resized(self.carried, room * sizeof(Message *))
            if carried != NULL:
                self.carried = <Message **>carried
            indices = resized(self.indices, room * sizeof(int))
            if indices != NULL:
                self.indices = <int *>indices
            if requests == NULL or carried == NULL or indices == NULL:
                self.error = MPI_ERR_NO_MEM
                return receiving and self.count < self.room
            self.room = room
        return True

    cdef void _add_request(self, Message *message) noexcept nogil:
        """Add a request for this message, for which there is room."""
        self.requests[self.count] = MPI_REQUEST_NULL
        self.carried[self.count] = message
        self.count += 1

    cdef bint post(self, Message *message, int destination) noexcept nogil:
        """Begin to send a message, which is one more use of it; the caller keeps its own.

        Return False, and set an error, if there is no memory: then nothing is sent.
        """
        cdef int lines = <int>(self.bytes[<int>message.room] // LINE)
        if self.queues.reaches(destination):
            if (self._is_held(destination, self.held_count) or not self.queues.write(
                    destination, message.memory, self.bytes[<int>message.room])):
                if not self._hold(message, destination):
                    return False
            self.posted[destination] += 1
            return True
        if not self._has_room(False):
            return False
        message.uses += 1
        pthread_mutex_lock(&mpi_mutex)
        self._add_request(message)
        check(&self.error, MPI_Isend(
            message.memory, lines, self.line, destination, MESSAGE_TAG, self.comm,
            &self.requests[self.count - 1]))
        pthread_mutex_unlock(&mpi_mutex)
        self.posted[destination] += 1
        return True

    cdef bint _hold(self, Message *message, int destination) noexcept nogil:
        """Keep a message until the queue has room; return False, with an error, without memory."""
        cdef int room
        cdef void *held
        if self.held_count == self.held_room:
            room = max(2 * self.held_room, 16)
            held = resized(self.held, room * sizeof(Held))
            if held == NULL:
                self.error = MPI_ERR_NO_MEM
                return False
            self.held, self.held_room = <Held *>held, room
        message.uses += 1
        self.held[self.held_count].message = message
        self.held[self.held_count].destination = destination
        self.held_count += 1
        return True

    cdef bint _is_held(self, int destination, int end) noexcept nogil:
        """Return whether one of the first `end` messages that are held is to this rank."""
        cdef int i
        for i in range(end):
            if self.held[i].destination == destination:
                return True
        return False

    cdef void _write_held(self) noexcept nogil:
        """Write those messages that queues have room for now, in order."""
        cdef int i, kept = 0, count = self.held_count
        cdef Held each
        for i in range(count):
            each = self.held[i]
            if not self._is_held(each.destination, kept) and self.queues.write(
                    each.destination, each.message.memory, self.bytes[<int>each.message.room]):
                self.release(each.message)
            else:
                self.held[kept] = each
                kept += 1
        self.held_count = kept

    cdef bint is_busy(self) noexcept nogil:
        """Return whether anything is in flight."""
        return self.count > 0 or self.held_count > 0

    # The end

    cdef bint is_over(self) noexcept nogil:
        return CountedMessages.is_over(self) and self.count == 0 and self.held_count == 0

    cdef void free_type(self) noexcept nogil:
        """Free the MPI datatype, once all messages are complete; the MPI mutex is held."""
        check(&self.error, MPI_Type_free(&self.line))
