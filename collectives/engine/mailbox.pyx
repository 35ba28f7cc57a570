# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Vectors that one rank sends another, beside what its application computes.

A `Mailbox` drives a protocol of `collectives.protocols.peers` over MPI: it is the port by which the
protocol acts. Whoever holds the lock of the collective that it belongs to advances it.
"""

from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE,
    MPI_BYTE,
    MPI_ERR_NO_MEM,
    MPI_LONG_LONG,
    MPI_MESSAGE_NULL,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_STATUSES_IGNORE,
    MPI_SUCCESS,
    MPI_UNDEFINED,
    MPI_Get_count,
    MPI_Ialltoall,
    MPI_Improbe,
    MPI_Imrecv,
    MPI_Isend,
    MPI_Message,
    MPI_Status,
    MPI_Test,
    MPI_Testsome,
    MPI_Type_commit,
    MPI_Type_contiguous,
    MPI_Type_free,
)
from mpi4py.MPI cimport Comm

from collectives.memory.allocation cimport LINE, allocate, try_to_allocate
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.layout cimport HEADER, Layout, UserVector
from collectives.protocols.peers cimport LEAVE, PeerProtocol

cdef enum:
    # What is in a message's header, eight bytes each.
    KIND
    NUMBER
    EPOCH
    WEIGHT
    # MessageList begun to be received at one look: those of a fast rank do not keep others waiting.
    MOST_AT_ONCE = 16
    TAG = 0


cdef inline long long *header(Message *message) noexcept nogil:
    return <long long *>message.memory


cdef inline double *weight_in(Message *message) noexcept nogil:
    return <double *>message.memory + WEIGHT


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


cdef class Mailbox(Port):
    """One rank's model, messages and protocol.

    Args:
        comm: a communicator of its own.
        like: list of float32 or float64 arrays, the model at the start.

    Attributes:
        protocol: the `PeerProtocol` that it drives, once `attach` was called.
        progress_count: how many messages have come; `bytes_sent`: bytes of vectors sent.
        nonfinite: changes that were left out because they were not finite.
    """

    def __init__(self, Comm comm, like):
        cdef UserVector opened
        cdef int count
        self.communicator = comm
        self.comm = comm.ob_mpi
        self.size = comm.Get_size()
        self.layout = Layout([array.dtype.name for array in like],
                             [array.size for array in like], False)
        count = self.layout.count
        self.model_arrays = <char **>calloc(3 * count, sizeof(char *))
        self.posted = <long long *>calloc(2 * self.size, sizeof(long long))
        if self.model_arrays == NULL or self.posted == NULL:
            raise MemoryError
        self.expected = self.posted + self.size
        self.gather = MPI_REQUEST_NULL
        self.change_arrays = self.model_arrays + count
        self.message_arrays = self.change_arrays + count
        self.model = allocate(self.layout.size)
        self.change = allocate(self.layout.size)
        memset(self.model, 0, self.layout.size)
        self.layout.locate(self.model_arrays, self.model)
        self.layout.locate(self.change_arrays, self.change)
        self._check(MPI_Type_contiguous(LINE, MPI_BYTE, &self.line))
        self._check(MPI_Type_commit(&self.line))
        opened = UserVector(like, self.layout, 0)
        self.layout.copy(self.model_arrays, opened.arrays)
        memcpy(self.change, self.model, self.layout.size)
        self.untouched = True

    def attach(self, PeerProtocol protocol):
        """Let this protocol say what happens."""
        self.protocol = protocol

    def __dealloc__(self):
        free_all(&self.free_short)
        free_all(&self.free_long)
        free_all(&self.coming)
        free_all(&self.kept)
        free(self.model)
        free(self.change)
        free(self.model_arrays)
        free(self.posted)
        free(self.requests)
        free(self.carried)
        free(self.indices)

    # Progress

    cdef bint progress(self) noexcept nogil:
        """Take in what has come; return whether anything is under way."""
        cdef int received
        pthread_mutex_lock(&mpi_mutex)
        for received in range(MOST_AT_ONCE):
            if not self._receive():
                break
        self._test()
        pthread_mutex_unlock(&mpi_mutex)
        self._deliver()
        return self.count > 0

    cdef bint _receive(self) noexcept nogil:
        """Begin to receive a message that is on its way, if there is one; the MPI mutex is held."""
        cdef MPI_Status status
        cdef MPI_Message arriving = MPI_MESSAGE_NULL
        cdef Message *message
        cdef int found = 0, lines = 0
        self._check(MPI_Improbe(MPI_ANY_SOURCE, TAG, self.comm, &found, &arriving, &status))
        if not found:
            return False
        self._check(MPI_Get_count(&status, self.line, &lines))
        message = self._allocate_message(lines > 1)
        if message == NULL or not self._add_request(message):
            return False
        message.source = status.MPI_SOURCE
        message.complete = False
        append(&self.coming, message)
        self._check(MPI_Imrecv(
            message.memory, lines, self.line, &arriving, &self.requests[self.count - 1]))
        return True

    cdef void _test(self) noexcept nogil:
        """See what has been sent and received; the MPI mutex is held."""
        cdef int done = 0, i, kept = 0
        cdef Message *message
        if self.count == 0:
            return
        self._check(MPI_Testsome(
            self.count, self.requests, &done, self.indices, MPI_STATUSES_IGNORE))
        if done == MPI_UNDEFINED or done == 0:
            return
        for i in range(done):
            message = self.carried[self.indices[i]]
            if message.uses > 0:
                message.uses -= 1
                if message.uses == 0:
                    self._recycle(message)
            else:
                message.complete = True
        for i in range(self.count):
            if self.requests[i] != MPI_REQUEST_NULL:
                self.requests[kept] = self.requests[i]
                self.carried[kept] = self.carried[i]
                kept += 1
        self.count = kept

    cdef void _deliver(self) noexcept nogil:
        """Hand the protocol what is there, each source's messages in their order."""
        cdef Message *message = self.coming.first
        cdef Message *following
        while message != NULL:
            following = message.next
            if (message.complete and (header(message)[EPOCH] <= self.epoch or self.ending)
                    and self._is_first_of_its_source(message)):
                remove(&self.coming, message)
                self.received += 1
                self.progress_count += 1
                # Who leaves does so for good, whatever others have done together meanwhile.
                if header(message)[EPOCH] != self.epoch and header(message)[KIND] != LEAVE:
                    self._recycle(message)
                else:
                    self._open(message)
            message = following

    cdef bint _is_first_of_its_source(self, Message *message) noexcept nogil:
        cdef Message *each = self.coming.first
        while each.source != message.source:
            each = each.next
        return each == message

    cdef void _open(self, Message *message) noexcept nogil:
        cdef int kind = <int>header(message)[KIND]
        cdef long long number = header(message)[NUMBER]
        cdef double weight = weight_in(message)[0]
        cdef int source = message.source
        if message.holds_vector:
            append(&self.kept, message)
        else:
            self._recycle(message)
        self.protocol.arrived(source, kind, number, weight)

    # MessageList

    cdef Message *_allocate_message(self, bint holds_vector) noexcept nogil:
        """A message to write or to receive; NULL and an error where there is no memory."""
        cdef MessageList *pool = &self.free_long if holds_vector else &self.free_short
        cdef Message *message = pool.first
        if message != NULL:
            remove(pool, message)
            return message
        message = <Message *>calloc(1, sizeof(Message))
        if message != NULL:
            message.holds_vector = holds_vector
            message.memory = try_to_allocate(self.layout.size if holds_vector else HEADER)
            if message.memory != NULL:
                # What is between arrays travels too.
                memset(message.memory, 0, self.layout.size if holds_vector else HEADER)
                return message
            free(message)
        self.error = MPI_ERR_NO_MEM
        return NULL

    cdef void _recycle(self, Message *message) noexcept nogil:
        message.uses = 0
        append(&self.free_long if message.holds_vector else &self.free_short, message)

    cdef Message *_kept_from(self, int source) noexcept nogil:
        """The oldest message with a vector from this rank, no longer kept."""
        cdef Message *message = self.kept.first
        while message.source != source:
            message = message.next
        remove(&self.kept, message)
        self.layout.locate(self.message_arrays, message.memory)
        return message

    cdef bint _add_request(self, Message *message) noexcept nogil:
        """Make room for a request that carries this message; return whether there is memory."""
        cdef int room
        cdef void *requests
        cdef void *carried
        cdef void *indices
        if self.count == self.room:
            room = max(2 * self.room, 16)
            requests = realloc(self.requests, room * sizeof(MPI_Request))
            if requests != NULL:
                self.requests = <MPI_Request *>requests
            carried = realloc(self.carried, room * sizeof(Message *))
            if carried != NULL:
                self.carried = <Message **>carried
            indices = realloc(self.indices, room * sizeof(int))
            if indices != NULL:
                self.indices = <int *>indices
            if requests == NULL or carried == NULL or indices == NULL:
                self.error = MPI_ERR_NO_MEM
                return False
            self.room = room
        self.requests[self.count] = MPI_REQUEST_NULL
        self.carried[self.count] = message
        self.count += 1
        return True

    cdef void _send(self, Message *message, int destination) noexcept nogil:
        cdef int lines = <int>((self.layout.size if message.holds_vector else HEADER) // LINE)
        if self.ending:
            return
        pthread_mutex_lock(&mpi_mutex)
        if self._add_request(message):
            message.uses += 1
            self._check(MPI_Isend(message.memory, lines, self.line, destination, TAG, self.comm,
                                  &self.requests[self.count - 1]))
        pthread_mutex_unlock(&mpi_mutex)
        self.posted[destination] += 1
        if message.holds_vector:
            self.bytes_sent += self.layout.size - HEADER

    cdef void _scale(self, char **to, char **source, double scale) noexcept nogil:
        cdef int i
        if scale == 1:
            self.layout.copy(to, source)
            return
        for i in range(self.layout.count):
            self.layout.kernels[i].combine(
                to[i], source[i], scale, source[i], 0, self.layout.length[i])

    # The port

    cdef void write(self, int kind, long long number) noexcept nogil:
        self._begin_message(kind, number, 0, False)

    cdef void write_model(
        self, int kind, long long number, double scale, double weight
    ) noexcept nogil:
        if self._begin_message(kind, number, weight, True):
            self._scale(self.message_arrays, self.model_arrays, scale)

    cdef void write_change(self, int kind, long long number) noexcept nogil:
        if self._begin_message(kind, number, 0, True):
            if self.changed:
                self.layout.copy(self.message_arrays, self.change_arrays)
            else:
                self.layout.zero(self.message_arrays)

    cdef bint _begin_message(
        self, int kind, long long number, double weight, bint holds_vector
    ) noexcept nogil:
        """Begin to write another message; return whether there is memory for it."""
        cdef Message *message = self.written
        if message != NULL:
            message.uses -= 1
            if message.uses == 0:
                self._recycle(message)
        message = self._allocate_message(holds_vector)
        self.written = message
        if message == NULL:
            return False
        message.uses = 1
        header(message)[KIND] = kind
        header(message)[NUMBER] = number
        header(message)[EPOCH] = self.epoch
        weight_in(message)[0] = weight
        if holds_vector:
            self.layout.locate(self.message_arrays, message.memory)
        return True

    cdef void post(self, int destination) noexcept nogil:
        if self.written != NULL:
            self._send(self.written, destination)

    cdef double mix(self, int source, double keep, double share) noexcept nogil:
        cdef Message *message = self._kept_from(source)
        cdef double weight = weight_in(message)[0]
        self.untouched = False
        if keep == 0 and share == 1:
            self.layout.copy(self.model_arrays, self.message_arrays)
        else:
            self.layout.combine(self.model_arrays, keep, self.message_arrays, share)
        self._recycle(message)
        return weight

    cdef void halve(self, int source, int kind, long long number) noexcept nogil:
        cdef Message *message = self._kept_from(source)
        self.untouched = False
        self.layout.combine(self.message_arrays, -0.5, self.model_arrays, 0.5)
        self.layout.combine(self.model_arrays, 1, self.message_arrays, -1)
        header(message)[KIND] = kind
        header(message)[NUMBER] = number
        header(message)[EPOCH] = self.epoch
        self._send(message, source)
        if message.uses == 0:
            self._recycle(message)

    cdef void drop(self, int source) noexcept nogil:
        self._recycle(self._kept_from(source))

    cdef void scale(self, double factor) noexcept nogil:
        if factor != 1:
            self.untouched = False
            self._scale(self.model_arrays, self.model_arrays, factor)

    cdef void publish(self, double scale) noexcept nogil:
        if self.changed and scale == 1 and self.untouched and self.user != NULL:
            self.layout.copy(self.model_arrays, self.user)  # the same, and not rounded
        elif self.changed:
            self.layout.combine(self.model_arrays, 1, self.change_arrays, scale)
            self.untouched = False
        self.changed = False

    cdef void return_model(self, double scale) noexcept nogil:
        self._scale(self.change_arrays, self.model_arrays, scale)
        self.unreturned = self.user == NULL
        self.untouched = scale == 1 and not self.unreturned
        if self.user != NULL:
            self.layout.copy(self.user, self.change_arrays)

    # The application

    cdef void begin_call(self, char **user) noexcept nogil:
        """The application calls with these arrays."""
        self.record_change(user)
        self.user = user
        self.protocol.call()

    cdef void record_change(self, char **user) noexcept nogil:
        """Note what the application has changed, in place of what it last got."""
        self.changed = False
        if self.unreturned:
            self.nonfinite += 1
            return
        self.layout.combine(self.change_arrays, -1, user, 1)
        self.changed = self.layout.all_finite(self.change_arrays)
        self.nonfinite += not self.changed

    cdef void publish_change(self, char **user) noexcept nogil:
        """Put what the application has changed into the model; it goes on from what it has."""
        self.record_change(user)
        self.publish(1)
        self.layout.copy(self.change_arrays, user)
        self.unreturned = False
        self.untouched = False

    cdef void go_on_from(self, char **user) noexcept nogil:
        """The application has these values, not quite those that it was given."""
        self.layout.copy(self.change_arrays, user)
        self.untouched = False

    cdef void forget_user(self) noexcept nogil:
        """The application's memory is its own again."""
        self.user = NULL

    cdef void restart(self, char **model, long long calls) noexcept nogil:
        """All ranks go on from new models, which their applications have."""
        cdef Message *message
        self.layout.copy(self.model_arrays, model)
        self.layout.copy(self.change_arrays, model)
        self.changed = False
        self.unreturned = False
        self.untouched = True
        self.epoch += 1
        while self.kept.first != NULL:
            message = self.kept.first
            remove(&self.kept, message)
            self._recycle(message)
        self.protocol.restart(calls)

    # The end

    cdef void end(self) noexcept nogil:
        """Nothing more is sent from here: learn how much was sent, by all ranks together."""
        self.ending = True
        pthread_mutex_lock(&mpi_mutex)
        self._check(MPI_Ialltoall(self.posted, 1, MPI_LONG_LONG, self.expected, 1, MPI_LONG_LONG,
                                  self.comm, &self.gather))
        pthread_mutex_unlock(&mpi_mutex)

    cdef bint is_over(self) noexcept nogil:
        """Whether everything sent has been received."""
        cdef long long sent = 0
        cdef int rank, done = 0
        pthread_mutex_lock(&mpi_mutex)
        self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        pthread_mutex_unlock(&mpi_mutex)
        if not done:
            return False
        for rank in range(self.size):
            sent += self.expected[rank]
        return self.count == 0 and self.received == sent

    cdef void free_type(self) noexcept nogil:
        """Give back what MPI has of it, once it is over; the MPI mutex is held."""
        self._check(MPI_Type_free(&self.line))

    cdef void _check(self, int rc) noexcept nogil:
        if rc != MPI_SUCCESS:
            self.error = rc
