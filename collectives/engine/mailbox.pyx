# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Vectors that ranks send each other while their applications compute.

A `Mailbox` drives a protocol of `collectives.protocols.peers` over MPI: it is the port by which the
protocol acts. The thread that holds the lock of its collective advances it.

A protocol learns of a long vector when the vector's message arrives, and the blocks follow later.
Its actions are therefore recorded as steps. They are executed in order, block by block, as soon as
possible: a step that writes a block of the model waits until that block has been sent.

Recorded steps end without another call of the application. A receiver takes a vector's blocks once
it has those of the sender's vector before, which no call that is still to be made holds back.
"""

from mpi4py.MPI cimport Comm

from collectives.engine.messages cimport (
    EPOCH,
    HOLDS,
    KIND,
    NUMBER,
    SHORT,
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
from collectives.memory.handover cimport UNKNOWN
from collectives.memory.layout cimport HEADER, Layout
from collectives.protocols.peers cimport LEAVE, PeerProtocol


cdef class Mailbox(Port):
    """One rank's model, messages and protocol.

    Args:
        comm: a communicator that only this mailbox uses.
        like: list of float32 or float64 arrays, the model at the start.
        whole: whether vectors are copied into their messages, the same on all ranks: where a rank
            has no progress thread, what it has sent must arrive without its participation.

    Attributes:
        protocol: the `PeerProtocol` that it drives, once `attach` was called.
        progress_count: number of messages received; `bytes_sent`: bytes of vectors sent.
        nonfinite: number of changes excluded because they were not finite, or were not known after
            an interrupted call.
    """

    def __init__(self, Comm comm, like, bint whole):
        self.layout = Layout([array.dtype.name for array in like],
                             [array.size for array in like], False)
        self.messages = Transfers(comm, self.layout, whole)
        self.vectors = PeerVectors(like, self.messages)
        self.same = True

    @property
    def vectors_kept(self):
        """The most vectors, besides the model and its change, that had memory at the same time."""
        return self.messages.made[<int>WHOLE]

    def attach(self, PeerProtocol protocol):
        """Set the protocol that this mailbox drives."""
        self.protocol = protocol

    cdef void begin(self) noexcept nogil:
        """Begin the protocol; all ranks have arrived."""
        self.protocol.begin()
        while self.advance():
            pass

    # Progress

    cdef bint progress(self) noexcept nogil:
        """Receive messages and execute steps; return whether work is in flight."""
        cdef bint queues = self.protocol.queues
        # While steps are pending, vectors that they do not use yet would only be in the way. But
        # where steps may never use them (`queues`), the sender would wait with blocks of its own.
        self.messages.takes_ahead = queues or self.vectors.first == NULL
        # This rank makes no calls for now; ranks that wait for it must learn that, and proceed.
        self.messages.takes_all = queues or self.protocol.paused and not (
            self.protocol.joined and self.protocol.follows)
        if self.error() != 0 and not self.messages.abandoned:
            # First the steps, which refer to transfers.
            self.vectors.abandon()
            self.messages.abandon()
        self.messages.progress()
        self._deliver()
        return self.advance() or self.vectors.first != NULL or self.messages.is_busy()

    cdef bint advance(self) noexcept nogil:
        """Execute recorded steps as far as possible now; return whether any advanced."""
        if not self.vectors.run():
            return False
        self.messages.progress_blocks()
        self.messages.moved += 1
        return True

    cdef void _deliver(self) noexcept nogil:
        """Deliver the messages that have arrived to the protocol."""
        cdef Message *message
        while self.messages.has_spare(True):
            message = self.messages.arrived(self.epoch)
            if message == NULL:
                return
            self.progress_count += 1
            self._open(message)

    cdef void _open(self, Message *message) noexcept nogil:
        cdef int kind = <int>header(message)[KIND]
        cdef long long number = header(message)[NUMBER]
        cdef double weight = weight_in(message)[0]
        cdef int source = message.source
        # LEAVE counts in any epoch: a rank that leaves does not return.
        cdef bint counts = header(message)[EPOCH] == self.epoch or kind == LEAVE
        cdef Transfer *transfer = NULL
        # Without memory the protocol hears no more: what it would use has been dropped.
        counts = counts and not (self.messages.ending or self.messages.abandoned)
        if header(message)[HOLDS]:
            transfer = self.messages.expect(message)
            transfer.dropped = not counts
        if message.room == SHORT:
            self.messages.recycle(message)
        if counts:
            self.protocol.arrived(source, kind, number, weight)

    # The port

    cdef void write(self, int kind, long long number) noexcept nogil:
        self._write(kind, number, 0, NULL)

    cdef void write_model(self, int kind, long long number, double weight) noexcept nogil:
        self._write(kind, number, weight, self.vectors.model)

    cdef void write_change(self, int kind, long long number) noexcept nogil:
        self._keep_apart()
        if not self.changed:
            self._note(ZERO, 1, NULL)
        self._write(kind, number, 0, self.vectors.change)

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
        self._head(message, kind, number, weight, vector != NULL)
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
        self, Message *message, int kind, long long number, double weight, bint holds
    ) noexcept nogil:
        header(message)[KIND] = kind
        header(message)[NUMBER] = number
        header(message)[EPOCH] = self.epoch
        header(message)[HOLDS] = holds
        weight_in(message)[0] = weight

    cdef void post(self, int destination) noexcept nogil:
        cdef Transfer *transfer
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
        if header(self.written)[HOLDS]:
            self.bytes_sent += self.layout.size - HEADER

    cdef double mix(self, int source, double keep, double share) noexcept nogil:
        cdef Transfer *transfer = self.messages.claim(source)
        self._keep_apart()
        self.vectors.add_use(MIX, transfer, keep, share)
        self._do_inside()
        return transfer.weight

    cdef void halve(self, int source, int kind, long long number) noexcept nogil:
        cdef Transfer *transfer = self.messages.claim(source)
        cdef Message *message = transfer.space
        cdef Step *step
        self._keep_apart()
        step = self.vectors.add_use(HALVE, transfer, 1, 1)
        if step == NULL:
            return
        if self.messages.inside:
            self._do_inside()
            # The received message itself is sent back.
            transfer.space = NULL
            self._head(message, kind, number, 0, True)
            message.uses = 1
        else:
            self._write(kind, number, 0, NULL)
            message = self.written
            if message == NULL or not self.messages.has_spare(False):
                return
            header(message)[HOLDS] = True
        if not self.messages.ending and self.messages.post(message, source):
            self.bytes_sent += self.layout.size - HEADER
            if not self.messages.inside:
                step.outgoing = self.messages.send(source, NULL)
                step.outgoing.back = transfer
        if self.messages.inside:
            self.messages.release(message)

    cdef void drop(self, int source) noexcept nogil:
        self.messages.claim(source).dropped = True

    cdef void scale(self, double factor) noexcept nogil:
        if factor != 1:
            self._keep_apart()
            self._note(SCALE, factor, NULL)

    cdef void publish(self, double scale) noexcept nogil:
        if self.unrecorded != NULL and self.against_model and scale == 1 and self.user != NULL:
            self._note(PUBLISH, 1, self.user)  # as adding the change, without rounding
            self.unrecorded = NULL
        elif self.changed:
            self._keep_apart()
            self.vectors.publish(scale)
            self._do_inside()
        self.changed = False

    cdef void return_model(self, double scale) noexcept nogil:
        self._keep_apart()
        self._note(RETURN, scale, self.user)
        self.unreturned = self.user == NULL
        self.same = scale == 1 and not self.unreturned

    cdef void _keep_apart(self) noexcept nogil:
        """Save what the application last got, or record its change, before the model changes."""
        if self.unrecorded != NULL:
            self.vectors.record(self.unrecorded, self.against_model)
            self.unrecorded = NULL
            self._do_inside()
        elif self.same:
            self._note(SAVE, 1, NULL)
        self.same = False

    cdef void _note(self, What what, double share, char **user) noexcept nogil:
        """Record a step, to be executed after all others."""
        self.vectors.add(what, share, user)
        self._do_inside()

    cdef void _do_inside(self) noexcept nogil:
        """Execute steps at once where vectors are in their messages: such steps never wait."""
        if self.messages.inside:
            self.vectors.run()

    cdef bint is_idle(self) noexcept nogil:
        """Return whether all recorded steps are executed, and all blocks are sent."""
        return self.vectors.first == NULL and self.messages.outgoing.first == NULL

    cdef bint has_answered(self) noexcept nogil:
        """Return whether the application's call is complete."""
        return not self.protocol.calling and self.vectors.answers == 0

    cdef int error(self) noexcept nogil:
        return self.messages.error if self.messages.error != 0 else self.vectors.error

    # The application

    cdef void begin_call(self, char **user, int finite=UNKNOWN) noexcept nogil:
        """Begin the application's call with these arrays; see `record_change`."""
        self.record_change(user, finite)
        self.user = user
        self.protocol.call()

    cdef void record_change(self, char **user, int finite=UNKNOWN) noexcept nogil:
        """Record the application's change, in place of what it last got.

        `finite`: whether the change is; UNKNOWN: it is checked now, and the vector has arrived.
        """
        cdef char **got = self.vectors.model_arrays if self.same else self.vectors.change_arrays
        if finite == UNKNOWN and not self.unreturned:
            finite = self.layout.finite_change(got, user, got)
        self.changed = finite == 1 and not self.unreturned
        self.nonfinite += not self.changed
        self.unrecorded = user if self.changed else NULL
        self.against_model = self.same
        self.same = self.got_there = False

    cdef void publish_change(self, char **user) noexcept nogil:
        """Add the application's change to the model; the application continues from its vector."""
        self.record_change(user)
        self.publish(1)
        self._note(KEEP, 1, user)
        self.unreturned = False

    cdef void go_on_from(self, char **user) noexcept nogil:
        """Note that the application holds these values, not quite those that it got."""
        self.layout.copy(self.vectors.change_arrays, user)
        self.same = False

    cdef void forget_user(self) noexcept nogil:
        """Stop using the application's buffer."""
        if self.unrecorded != NULL:
            self._keep_apart()
        self.user = NULL
        if self.vectors.forget_user():
            self.unreturned = True
            self.same = False

    cdef void read_model(self, char **user) noexcept nogil:
        """Copy the model to the application, as calls return it; all steps have been executed."""
        cdef int block
        for block in range(self.messages.blocks.count):
            self.messages.blocks.scale(
                block, user, self.vectors.model_arrays, self.protocol.factor())

    cdef void restart(self, char **model, long long calls) noexcept nogil:
        """Restart from a new model, which the application holds, as all ranks do; see `is_idle`."""
        self.layout.copy(self.vectors.model_arrays, model)
        self.changed = False
        self.unreturned = False
        self.same = True
        self.got_there = False
        self.epoch += 1
        self.messages.drop_all()
        self.protocol.restart(calls)
        while self.advance():
            pass

    cdef bint is_over(self) noexcept nogil:
        """Return whether everything sent to this rank has arrived, and was used or dropped."""
        return self.vectors.first == NULL and self.messages.is_over()
