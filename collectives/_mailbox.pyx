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

from collectives._memory cimport LINE, allocate, try_to_allocate
from collectives._mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives._vectors cimport HEADER, Layout, Opened
from collectives.protocols.peers cimport LEAVE, Peers

cdef enum:
    # What is in a letter's header, eight bytes each.
    KIND
    NUMBER
    EPOCH
    WEIGHT
    # Letters begun to be received at one look: those of a fast rank do not keep others waiting.
    MOST_AT_ONCE = 16
    TAG = 0


cdef inline long long *header(Letter *letter) noexcept nogil:
    return <long long *>letter.memory


cdef inline double *weight_in(Letter *letter) noexcept nogil:
    return <double *>letter.memory + WEIGHT


cdef void append(Letters *letters, Letter *letter) noexcept nogil:
    letter.next = NULL
    if letters.first == NULL:
        letters.first = letter
    else:
        letters.last.next = letter
    letters.last = letter


cdef void remove(Letters *letters, Letter *letter) noexcept nogil:
    cdef Letter *before = NULL
    cdef Letter *each = letters.first
    while each != letter:
        before = each
        each = each.next
    if before == NULL:
        letters.first = letter.next
    else:
        before.next = letter.next
    if letters.last == letter:
        letters.last = before


cdef void free_all(Letters *letters) noexcept nogil:
    cdef Letter *letter = letters.first
    cdef Letter *following
    while letter != NULL:
        following = letter.next
        free(letter.memory)
        free(letter)
        letter = following
    letters.first = NULL


cdef class Mailbox(Port):
    """One rank's model, letters and protocol.

    Args:
        comm: a communicator of its own.
        like: list of float32 or float64 arrays, the model at the start.

    Attributes:
        protocol: the `Peers` that it drives, once `attach` was called.
        moves: how many letters have come; `bytes_sent`: bytes of vectors sent.
        nonfinite: changes that were left out because they were not finite.
    """

    def __init__(self, Comm comm, like):
        cdef Opened opened
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
        self.letter_arrays = self.change_arrays + count
        self.model = allocate(self.layout.size)
        self.change = allocate(self.layout.size)
        memset(self.model, 0, self.layout.size)
        self.layout.place(self.model_arrays, self.model)
        self.layout.place(self.change_arrays, self.change)
        self._check(MPI_Type_contiguous(LINE, MPI_BYTE, &self.line))
        self._check(MPI_Type_commit(&self.line))
        opened = Opened(like, self.layout, 0)
        self.layout.copy(self.model_arrays, opened.arrays)
        memcpy(self.change, self.model, self.layout.size)
        self.untouched = True

    def attach(self, Peers protocol):
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
        """Begin to receive a letter that is on its way, if there is one; the MPI mutex is held."""
        cdef MPI_Status status
        cdef MPI_Message message = MPI_MESSAGE_NULL
        cdef Letter *letter
        cdef int found = 0, lines = 0
        self._check(MPI_Improbe(MPI_ANY_SOURCE, TAG, self.comm, &found, &message, &status))
        if not found:
            return False
        self._check(MPI_Get_count(&status, self.line, &lines))
        letter = self._take_letter(lines > 1)
        if letter == NULL or not self._add_request(letter):
            return False
        letter.source = status.MPI_SOURCE
        letter.complete = False
        append(&self.coming, letter)
        self._check(MPI_Imrecv(
            letter.memory, lines, self.line, &message, &self.requests[self.count - 1]))
        return True

    cdef void _test(self) noexcept nogil:
        """See what has been sent and received; the MPI mutex is held."""
        cdef int done = 0, i, kept = 0
        cdef Letter *letter
        if self.count == 0:
            return
        self._check(MPI_Testsome(
            self.count, self.requests, &done, self.indices, MPI_STATUSES_IGNORE))
        if done == MPI_UNDEFINED or done == 0:
            return
        for i in range(done):
            letter = self.carried[self.indices[i]]
            if letter.uses > 0:
                letter.uses -= 1
                if letter.uses == 0:
                    self._recycle(letter)
            else:
                letter.complete = True
        for i in range(self.count):
            if self.requests[i] != MPI_REQUEST_NULL:
                self.requests[kept] = self.requests[i]
                self.carried[kept] = self.carried[i]
                kept += 1
        self.count = kept

    cdef void _deliver(self) noexcept nogil:
        """Hand the protocol what is there, each source's letters in their order."""
        cdef Letter *letter = self.coming.first
        cdef Letter *following
        while letter != NULL:
            following = letter.next
            if (letter.complete and (header(letter)[EPOCH] <= self.epoch or self.ending)
                    and self._is_first_of_its_source(letter)):
                remove(&self.coming, letter)
                self.received += 1
                self.moves += 1
                # Who leaves does so for good, whatever others have done together meanwhile.
                if header(letter)[EPOCH] != self.epoch and header(letter)[KIND] != LEAVE:
                    self._recycle(letter)
                else:
                    self._open(letter)
            letter = following

    cdef bint _is_first_of_its_source(self, Letter *letter) noexcept nogil:
        cdef Letter *each = self.coming.first
        while each.source != letter.source:
            each = each.next
        return each == letter

    cdef void _open(self, Letter *letter) noexcept nogil:
        cdef int kind = <int>header(letter)[KIND]
        cdef long long number = header(letter)[NUMBER]
        cdef double weight = weight_in(letter)[0]
        cdef int source = letter.source
        if letter.holds_vector:
            append(&self.kept, letter)
        else:
            self._recycle(letter)
        self.protocol.arrived(source, kind, number, weight)

    # Letters

    cdef Letter *_take_letter(self, bint holds_vector) noexcept nogil:
        """A letter to write or to receive; NULL and an error where there is no memory."""
        cdef Letters *pool = &self.free_long if holds_vector else &self.free_short
        cdef Letter *letter = pool.first
        if letter != NULL:
            remove(pool, letter)
            return letter
        letter = <Letter *>calloc(1, sizeof(Letter))
        if letter != NULL:
            letter.holds_vector = holds_vector
            letter.memory = try_to_allocate(self.layout.size if holds_vector else HEADER)
            if letter.memory != NULL:
                # What is between arrays travels too.
                memset(letter.memory, 0, self.layout.size if holds_vector else HEADER)
                return letter
            free(letter)
        self.error = MPI_ERR_NO_MEM
        return NULL

    cdef void _recycle(self, Letter *letter) noexcept nogil:
        letter.uses = 0
        append(&self.free_long if letter.holds_vector else &self.free_short, letter)

    cdef Letter *_kept_from(self, int source) noexcept nogil:
        """The oldest letter with a vector from this rank, no longer kept."""
        cdef Letter *letter = self.kept.first
        while letter.source != source:
            letter = letter.next
        remove(&self.kept, letter)
        self.layout.place(self.letter_arrays, letter.memory)
        return letter

    cdef bint _add_request(self, Letter *letter) noexcept nogil:
        """Make room for a request that carries this letter; return whether there is memory."""
        cdef int room
        cdef void *requests
        cdef void *carried
        cdef void *indices
        if self.count == self.room:
            room = max(2 * self.room, 16)
            requests = realloc(self.requests, room * sizeof(MPI_Request))
            if requests != NULL:
                self.requests = <MPI_Request *>requests
            carried = realloc(self.carried, room * sizeof(Letter *))
            if carried != NULL:
                self.carried = <Letter **>carried
            indices = realloc(self.indices, room * sizeof(int))
            if indices != NULL:
                self.indices = <int *>indices
            if requests == NULL or carried == NULL or indices == NULL:
                self.error = MPI_ERR_NO_MEM
                return False
            self.room = room
        self.requests[self.count] = MPI_REQUEST_NULL
        self.carried[self.count] = letter
        self.count += 1
        return True

    cdef void _send(self, Letter *letter, int destination) noexcept nogil:
        cdef int lines = <int>((self.layout.size if letter.holds_vector else HEADER) // LINE)
        if self.ending:
            return
        pthread_mutex_lock(&mpi_mutex)
        if self._add_request(letter):
            letter.uses += 1
            self._check(MPI_Isend(letter.memory, lines, self.line, destination, TAG, self.comm,
                                  &self.requests[self.count - 1]))
        pthread_mutex_unlock(&mpi_mutex)
        self.posted[destination] += 1
        if letter.holds_vector:
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
        self._begin_letter(kind, number, 0, False)

    cdef void write_model(
        self, int kind, long long number, double scale, double weight
    ) noexcept nogil:
        if self._begin_letter(kind, number, weight, True):
            self._scale(self.letter_arrays, self.model_arrays, scale)

    cdef void write_change(self, int kind, long long number) noexcept nogil:
        if self._begin_letter(kind, number, 0, True):
            if self.changed:
                self.layout.copy(self.letter_arrays, self.change_arrays)
            else:
                self.layout.zero(self.letter_arrays)

    cdef bint _begin_letter(
        self, int kind, long long number, double weight, bint holds_vector
    ) noexcept nogil:
        """Begin to write another letter; return whether there is memory for it."""
        cdef Letter *letter = self.written
        if letter != NULL:
            letter.uses -= 1
            if letter.uses == 0:
                self._recycle(letter)
        letter = self._take_letter(holds_vector)
        self.written = letter
        if letter == NULL:
            return False
        letter.uses = 1
        header(letter)[KIND] = kind
        header(letter)[NUMBER] = number
        header(letter)[EPOCH] = self.epoch
        weight_in(letter)[0] = weight
        if holds_vector:
            self.layout.place(self.letter_arrays, letter.memory)
        return True

    cdef void post(self, int destination) noexcept nogil:
        if self.written != NULL:
            self._send(self.written, destination)

    cdef double mix(self, int source, double keep, double share) noexcept nogil:
        cdef Letter *letter = self._kept_from(source)
        cdef double weight = weight_in(letter)[0]
        self.untouched = False
        if keep == 0 and share == 1:
            self.layout.copy(self.model_arrays, self.letter_arrays)
        else:
            self.layout.combine(self.model_arrays, keep, self.letter_arrays, share)
        self._recycle(letter)
        return weight

    cdef void halve(self, int source, int kind, long long number) noexcept nogil:
        cdef Letter *letter = self._kept_from(source)
        self.untouched = False
        self.layout.combine(self.letter_arrays, -0.5, self.model_arrays, 0.5)
        self.layout.combine(self.model_arrays, 1, self.letter_arrays, -1)
        header(letter)[KIND] = kind
        header(letter)[NUMBER] = number
        header(letter)[EPOCH] = self.epoch
        self._send(letter, source)
        if letter.uses == 0:
            self._recycle(letter)

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

    cdef void take(self, double scale) noexcept nogil:
        self._scale(self.change_arrays, self.model_arrays, scale)
        self.unreturned = self.user == NULL
        self.untouched = scale == 1 and not self.unreturned
        if self.user != NULL:
            self.layout.copy(self.user, self.change_arrays)

    # The application

    cdef void begin_call(self, char **user) noexcept nogil:
        """The application calls with these arrays."""
        self.take_in(user)
        self.user = user
        self.protocol.call()

    cdef void take_in(self, char **user) noexcept nogil:
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
        self.take_in(user)
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
        cdef Letter *letter
        self.layout.copy(self.model_arrays, model)
        self.layout.copy(self.change_arrays, model)
        self.changed = False
        self.unreturned = False
        self.untouched = True
        self.epoch += 1
        while self.kept.first != NULL:
            letter = self.kept.first
            remove(&self.kept, letter)
            self._recycle(letter)
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
