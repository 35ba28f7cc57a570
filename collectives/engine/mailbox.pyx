"""Vectors that ranks send each other while their applications compute.

A `Mailbox` is the port of a `PeerRankProtocol`, which decides what it does over MPI. The thread that
holds the lock of its collective advances it.

The protocol learns of a long vector when the vector's message arrives, and the blocks follow later.
Its actions are therefore recorded as steps. They are executed in order, block by block, as soon as
possible: a step that writes a block of the model waits until that block has been sent.

Recorded steps are completed without another call of the application: a receiver takes the blocks of
a vector once it has all those of the sender's previous vector, and no later call delays these.
"""

from mpi4py.MPI cimport Comm

from collectives.engine.messages cimport (
    EPOCH,
    HOLDS,
    KIND,
    MODEL,
    NOTHING,
    NUMBER,
    SHORT,
    VECTOR,
    WHOLE,
    Message,
    header,
    weight_in,
)
from collectives.engine.peer_vectors cimport (
    HALVE,
    KEEP,
    MIX,
    PUBLISH,
    RETURN,
    SAVE,
    SCALE,
    SEND,
    ZERO,
    PeerVectors,
    Step,
)
from collectives.engine.transfers cimport Transfer, Transfers
from collectives.exchange.clock cimport now
from collectives.memory.handover cimport UNKNOWN
from collectives.memory.layout cimport HEADER, Layout
from collectives.protocols.peer_rank cimport PeerRankProtocol
from collectives.protocols.peers cimport PeerProtocol
from collectives.recording.recorder cimport RECEIVED, SENT, record, recording


cdef class Mailbox(PeerRankPort):
    """One rank's model and messages.

    Args:
        comm: a communicator that only this mailbox uses.
        like: list of float32 or float64 arrays, the model at the start.
        whole: whether vectors are copied into their messages, the same on all ranks: where a rank
            has no progress thread, what it has sent must arrive without its participation.
        ranks: those of this node, sorted.
        sharing: whether ranks of a node send each other vectors in memory that they share, the same
            on all ranks.

    Attributes:
        deciding: the `PeerRankProtocol` whose port it is.
        progress_count: number of messages received; `bytes_sent`: bytes of vectors sent.
    """

    def __init__(self, Comm comm, like, bint whole, ranks, bint sharing):
        self.layout = Layout([array.dtype.name for array in like],
                             [array.size for array in like], False)
        self.messages = Transfers(comm, self.layout, whole, ranks, sharing)
        self.vectors = PeerVectors(like, self.messages)
        self.deciding = PeerRankProtocol(self)

    @property
    def vectors_kept(self):
        """The most vectors, besides the model and its change, that had memory at the same time."""
        return self.messages.made[<int>WHOLE]

    @property
    def queues(self):
        """The `NodeQueues` to and from ranks of this node."""
        return self.messages.queues

    def attach(self, PeerProtocol exchanging):
        """Set the protocol whose port is `deciding`."""
        self.deciding.attach(exchanging)

    cdef void begin(self) noexcept nogil:
        """Begin the protocol; all ranks have arrived."""
        self.deciding.exchanging.begin()
        while self.advance():
            pass

    # Progress

    cdef bint progress(self) noexcept nogil:
        """Receive messages and execute steps; return whether work is in flight."""
        self.messages.takes_ahead = self.deciding.takes_ahead()
        self.messages.takes_all = self.deciding.takes_all()
        if self.error() != 0 and not self.messages.abandoned:
            # First the steps, which refer to transfers.
            self.vectors.abandon()
            self.messages.abandon()
        self.messages.progress()
        self._deliver()
        return self.advance() or self.vectors.first != NULL or self.messages.is_busy()

    cdef bint advance(self) noexcept nogil:
        """Execute recorded steps as far as possible now; return whether any advanced.

        What these cannot use yet is received after them.
        """
        cdef bint advanced = self.vectors.run()
        self.messages.progress_blocks(advanced)
        self.messages.moved += advanced
        return advanced

    cdef void _deliver(self) noexcept nogil:
        """Deliver the messages that have arrived to the protocol."""
        cdef Message *message
        while self.messages.has_spare(True):
            message = self.messages.arrived(self.deciding.epoch)
            if message == NULL:
                return
            self.progress_count += 1
            self._open(message)

    cdef void _open(self, Message *message) noexcept nogil:
        cdef int kind = <int>header(message)[KIND]
        cdef long long number = header(message)[NUMBER]
        cdef double weight = weight_in(message)[0]
        cdef int source = message.source
        cdef bint counts = self.deciding.counts(kind, header(message)[EPOCH])
        cdef Transfer *transfer = NULL
        if recording():
            record(RECEIVED, self.number, now(), 0, source, number,
                   4 * kind + 2 * self.deciding.exchanging.waits_for(source)
                   + (header(message)[HOLDS] != NOTHING))
        # Once memory is lacking, the protocol gets no messages: their vectors have been dropped.
        counts = counts and not (self.messages.ending or self.messages.abandoned)
        if header(message)[HOLDS]:
            transfer = self.messages.expect(message)
            transfer.dropped = not counts
        if message.room == SHORT:
            self.messages.recycle(message)
        if counts:
            self.deciding.exchanging.arrived(source, kind, number, weight)

    # Messages

    cdef void write(self, int kind, long long number) noexcept nogil:
        self._write(kind, number, 0, NULL)

    cdef void write_model(self, int kind, long long number, double weight) noexcept nogil:
        self._write(kind, number, weight, self.vectors.model)

    cdef void write_change(self, int kind, long long number, double weight) noexcept nogil:
        self._write(kind, number, weight, self.vectors.change)

    cdef void _write(
        self, int kind, long long number, double weight, char *vector
    ) noexcept nogil:
        """Write the next message, with a vector or without; none after an error."""
        cdef Message *message = self.written
        cdef bint inside = vector != NULL and self.messages.inside
        self.sending = NULL
        self.written = NULL
        if message != NULL:
            self.messages.release(message)
        if self.error() != 0:
            return
        message = self.messages.allocate(WHOLE if inside else SHORT)
        if message == NULL:
            return
        message.uses = 1
        self._head(message, kind, number, weight, NOTHING if vector == NULL else
                   MODEL if vector == self.vectors.model else VECTOR)
        if inside:
            self.messages.blocks.copy(0, message.memory, vector)
        elif vector != NULL:
            self.sending = self.vectors.add(SEND, 1, NULL)
            if self.sending == NULL:
                self.messages.release(message)
                return
            self.sending.memory = vector
        self.written = message

    cdef void _head(
        self, Message *message, int kind, long long number, double weight, int holds
    ) noexcept nogil:
        header(message)[KIND] = kind
        header(message)[NUMBER] = number
        header(message)[EPOCH] = self.deciding.epoch
        header(message)[HOLDS] = holds
        weight_in(message)[0] = weight

    cdef void post(self, int destination) noexcept nogil:
        cdef Transfer *transfer
        cdef long long began = now() if recording() else 0
        if self.written == NULL or self.messages.ending:
            return
        # A message is not sent without its vector.
        if self.sending != NULL and not self.messages.has_spare(False):
            return
        if not self.messages.post(self.written, destination):
            return
        if self.sending != NULL:
            transfer = self.messages.send(destination, self.sending.memory)
            transfer.sibling = self.sending.outgoing
            self.sending.outgoing = transfer
        self._sent(self.written, destination, began)

    cdef void _sent(self, Message *message, int destination, long long began) noexcept nogil:
        """Count the bytes of a message's vector, unless it is copied within the node; note it.

        `began` is the time before it was posted: the receiver may have it at once.
        """
        cdef long long holds = header(message)[HOLDS]
        cdef bint near = self.messages.queues.reaches(destination)
        if holds == VECTOR and not (near and self.messages.inside) or holds == MODEL and not near:
            self.bytes_sent += self.layout.size - HEADER
        if began:
            record(SENT, self.number, began, 0, destination, header(message)[NUMBER],
                   4 * header(message)[KIND] + (holds != NOTHING))

    cdef double mix(self, int source, double keep, double share) noexcept nogil:
        cdef Transfer *transfer = self.messages.claim(source)
        self.vectors.add_use(MIX, transfer, keep, share)
        self._do_inside()
        return transfer.weight

    cdef void halve(self, int source, int kind, long long number) noexcept nogil:
        cdef Transfer *transfer = self.messages.claim(source)
        cdef Message *message = transfer.space
        cdef Step *step = self.vectors.add_use(HALVE, transfer, 1, 1)
        cdef long long began = now() if recording() else 0
        if step == NULL:
            return
        if self.messages.inside:
            self._do_inside()
            # The received message itself is sent back.
            transfer.space = NULL
            self._head(message, kind, number, 0, VECTOR)
            message.uses = 1
        else:
            self._write(kind, number, 0, NULL)
            message = self.written
            if message == NULL or not self.messages.has_spare(False):
                return
            header(message)[HOLDS] = VECTOR
        if not self.messages.ending and self.messages.post(message, source):
            self._sent(message, source, began)
            if not self.messages.inside:
                step.outgoing = self.messages.send(source, NULL)
                step.outgoing.back = transfer
        if self.messages.inside:
            self.messages.release(message)

    cdef void drop(self, int source) noexcept nogil:
        self.messages.claim(source).dropped = True

    # Vectors

    cdef void record(self, bint against_model) noexcept nogil:
        self.vectors.record(self.user, against_model)
        self._do_inside()

    cdef void save(self) noexcept nogil:
        self._note(SAVE, 1, NULL)

    cdef void clear(self) noexcept nogil:
        self._note(ZERO, 1, NULL)

    cdef void keep(self) noexcept nogil:
        self._note(KEEP, 1, self.user)

    cdef void scale(self, double factor) noexcept nogil:
        self._note(SCALE, factor, NULL)

    cdef void look_ahead(self, double momentum) noexcept nogil:
        self.vectors.look_ahead(momentum)
        self._do_inside()

    cdef void publish(self, double scale) noexcept nogil:
        self.vectors.publish(scale)
        self._do_inside()

    cdef void replace(self) noexcept nogil:
        self._note(PUBLISH, 1, self.user)

    cdef void return_model(self, double scale) noexcept nogil:
        self._note(RETURN, scale, self.user)

    cdef void keep_model(self, double scale) noexcept nogil:
        self._note(RETURN, scale, NULL)

    cdef void hold(self) noexcept nogil:
        self.layout.copy(self.vectors.change_arrays, self.user)

    cdef void load(self) noexcept nogil:
        self.layout.copy(self.vectors.model_arrays, self.user)
        self.messages.drop_all()

    cdef bint adopt(self) noexcept nogil:
        self.user = NULL
        return self.vectors.forget_user()

    cdef void _note(self, What what, double share, char **user) noexcept nogil:
        """Record a step, to be executed after all others."""
        self.vectors.add(what, share, user)
        self._do_inside()

    cdef void _do_inside(self) noexcept nogil:
        """Execute steps at once where vectors are in their messages: such steps never wait."""
        if self.messages.inside:
            self.vectors.run()

    # What is known

    cdef bint is_change_finite(self, bint against_model) noexcept nogil:
        cdef char **got = (
            self.vectors.model_arrays if against_model else self.vectors.change_arrays)
        if self.vectors.arrives and self.finite != UNKNOWN:
            return self.finite
        return self.layout.finite_change(got, self.user, got)

    cdef bint is_checked(self) noexcept nogil:
        return self.vectors.handover.checked()

    cdef bint knows_change(self, bint bounded) noexcept nogil:
        self.finite = self.vectors.handover.finite
        if self.finite == 1 and not (bounded and self.vectors.handover.bounded()):
            self.finite = UNKNOWN
        return self.finite != UNKNOWN

    cdef bint is_here(self) noexcept nogil:
        return self.vectors.handover.arrived()

    cdef bint is_lost(self) noexcept nogil:
        return self.vectors.handover.error != 0

    cdef bint takes_whole(self) noexcept nogil:
        return self.messages.inside

    cdef bint is_pending(self) noexcept nogil:
        return self.vectors.first != NULL

    cdef bint answers(self) noexcept nogil:
        return self.vectors.answers != 0

    cdef bint is_idle(self) noexcept nogil:
        """Return whether all recorded steps are executed, and all blocks are sent."""
        return self.vectors.first == NULL and self.messages.outgoing.first == NULL

    cdef int error(self) noexcept nogil:
        return self.messages.error if self.messages.error != 0 else self.vectors.error

    # The application

    cdef void read_model(self, char **user) noexcept nogil:
        """Copy the model to the application, as calls return it; all steps have been executed."""
        cdef int block
        for block in range(self.messages.blocks.count):
            self.messages.blocks.scale(
                block, user, self.vectors.model_arrays, self.deciding.exchanging.factor())

    cdef void restart(self, char **model, long long calls) noexcept nogil:
        """Restart from a new model, as all ranks do; see `is_idle`."""
        self.user = model
        self.deciding.restart(calls)
        self.user = NULL
        while self.advance():
            pass

    cdef bint is_over(self) noexcept nogil:
        """Return whether everything sent to this rank has arrived, and was used or dropped."""
        return self.vectors.first == NULL and self.messages.is_over()
