"""Vectors that follow messages from one rank to another, in blocks.

Blocks are sent from the vector itself, and received where they are used: a receive is posted once
the block has memory. If a step is using the vector, only a few blocks have memory at a time, else
all. A short vector is inside its message, and is treated like one whose blocks have all arrived.
The blocks of vectors that no step will use are received into one block, allocated at the start, so
that their senders complete.

Between ranks of one node, the blocks of a model are not sent: the receiver copies them, in the order
in which models were sent, from the sender's memory, while the sender does not overwrite them.
"""

from libc.stdlib cimport free
from libc.string cimport memset
from mpi4py.libmpi cimport (
    MPI_BYTE,
    MPI_ERR_NO_MEM,
    MPI_STATUS_IGNORE,
    MPI_Irecv,
    MPI_Isend,
    MPI_Test,
)
from mpi4py.MPI cimport Comm

from collectives.engine.messages cimport (
    HOLDS,
    MODEL,
    TURNS,
    WHOLE,
    Message,
    Messages,
    header,
    weight_in,
)
from collectives.engine.tags cimport BLOCK_TAG
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.exchange.return_codes cimport check
from collectives.memory.allocation cimport LINE, allocate, round_up, zeroed
from collectives.memory.blocks cimport Blocks
from collectives.memory.layout cimport Layout

cdef enum:
    # Bytes of the shortest and the longest block, and into how many a vector is divided between.
    SHORTEST = 65536
    LONGEST = 262144
    BLOCKS = 8
    # How many blocks of a vector have memory at a time while a step uses it.
    DEPTH = 4


cdef void free_transfers(Transfer *transfer) noexcept nogil:
    cdef Transfer *following
    while transfer != NULL:
        following = transfer.next
        if transfer.space != NULL:
            free(transfer.space.memory)
            free(transfer.space)
        free(transfer.requests)
        free(transfer)
        transfer = following


cdef Py_ssize_t block_of(Py_ssize_t size) noexcept:
    """Return the bytes of a block: ranks use one while the next are on their way."""
    return round_up(min(max(size // BLOCKS, SHORTEST), LONGEST), LINE)


cdef class Transfers(Messages):
    """Messages, and the vectors that follow them.

    Args:
        comm, layout, inside, ranks, sharing: see `Messages`.
    """

    def __init__(self, Comm comm, Layout layout, bint inside, ranks, bint sharing):
        Messages.__init__(self, comm, layout, inside, ranks, sharing)
        self.shown = <unsigned long long *>zeroed(2 * self.size, sizeof(unsigned long long))
        if self.shown == NULL:
            raise MemoryError
        self.seen = self.shown + self.size
        self.blocks = Blocks(layout, layout.size if self.inside else block_of(layout.size))
        self.bytes[<int>TURNS] = DEPTH * self.blocks.length
        while self.spare <= self.reserved:
            if not self._add_spare():
                raise MemoryError
        if not self.inside:
            self.discarded = allocate(self.blocks.length)
            self.zeros = <char *>zeroed(self.blocks.length, 1)
            if self.zeros == NULL:
                raise MemoryError

    def __dealloc__(self):
        free_transfers(self.idle)
        free_transfers(self.incoming.first)
        free_transfers(self.outgoing.first)
        free(self.discarded)
        free(self.zeros)
        free(self.shown)

    cdef bint uses_mpi(self) noexcept nogil:
        return self.by_mpi > 0 or Messages.uses_mpi(self)

    cdef void progress_blocks(self, bint advanced) noexcept nogil:
        """Send and receive all blocks that can be now; by MPI only if steps have advanced."""
        if self.queues.in_use:
            self._move_in_memory()
        if advanced and self.by_mpi > 0:
            pthread_mutex_lock(&mpi_mutex)
            self._move_blocks()
            pthread_mutex_unlock(&mpi_mutex)

    cdef Transfer *send(self, int destination, char *memory) noexcept nogil:
        """Begin to send a vector after its message; its blocks are sent once they are `ready`.

        Only if `has_spare`.
        """
        cdef Transfer *transfer = self._new_transfer(&self.outgoing, destination)
        transfer.memory = memory
        self._note_in_memory(
            transfer, memory == self.queues.model and self.queues.reaches(destination),
            &self.shown[destination])
        return transfer

    cdef void _note_in_memory(
        self, Transfer *transfer, bint in_memory, unsigned long long *blocks
    ) noexcept nogil:
        """Note whether the blocks of a transfer are copied in memory, after so many others."""
        transfer.in_memory, transfer.by_mpi = in_memory, not in_memory
        self.by_mpi += transfer.by_mpi
        if in_memory:
            transfer.before = blocks[0]
            blocks[0] += self.blocks.count

    cdef Transfer *expect(self, Message *message) noexcept nogil:
        """Begin to receive the vector in, or after, a message; only if `has_spare`."""
        cdef Transfer *transfer = self._new_transfer(&self.incoming, message.source)
        transfer.weight = weight_in(message)[0]
        if message.room == WHOLE:
            transfer.space = message
            transfer.memory = message.memory
            transfer.begun = transfer.complete = self.blocks.count
            return transfer
        self._note_in_memory(
            transfer, header(message)[HOLDS] == MODEL and self.queues.reaches(message.source),
            &self.seen[message.source])
        return transfer

    cdef Transfer *claim(self, int source) noexcept nogil:
        """Claim the oldest unused vector from this rank, and return it."""
        cdef Transfer *transfer = self.incoming.first
        while transfer.peer != source or transfer.claimed or transfer.dropped:
            transfer = transfer.next
        transfer.claimed = True
        return transfer

    cdef void drop_all(self) noexcept nogil:
        """Drop all incoming vectors that are not claimed."""
        cdef Transfer *transfer = self.incoming.first
        while transfer != NULL:
            transfer.dropped = transfer.dropped or not transfer.claimed
            transfer = transfer.next

    cdef bint is_free(self, char *memory, int block) noexcept nogil:
        """Return whether a block of this vector may be written to: no transfer is sending it."""
        cdef Transfer *transfer = self.outgoing.first
        while transfer != NULL:
            if transfer.memory == memory and transfer.ready > block >= transfer.complete:
                return False
            transfer = transfer.next
        return True

    cdef char *place(self, Transfer *transfer, int block) noexcept nogil:
        """Return the address of a transfer's block."""
        if transfer.folded:
            return transfer.memory
        if transfer.in_turns:
            return transfer.memory + block % DEPTH * self.blocks.length
        return transfer.memory + self.blocks.begin(block)

    cdef void abandon(self) noexcept nogil:
        """Continue without memory: drop incoming vectors that have none yet, and later ones.

        Vectors that have memory still arrive, and those being sent still reach their receivers.
        """
        cdef Transfer *transfer = self.incoming.first
        self.abandoned = True
        while transfer != NULL:
            transfer.dropped = transfer.dropped or transfer.memory == NULL
            transfer = transfer.next

    cdef void send_zeros(self, Transfer *transfer) noexcept nogil:
        """Send zeros in place of a vector that will never be ready."""
        transfer.memory = self.zeros
        transfer.folded = True
        transfer.back = NULL

    cdef bint has_spare(self, bint receiving) noexcept nogil:
        """Return whether another vector can be sent, or received; set an error without memory.

        `reserved` transfers are kept for receiving, as many as short messages.
        """
        return (self.spare > self.reserved or self._add_spare()
                or receiving and self.spare > 0)

    cdef bint _add_spare(self) noexcept nogil:
        """Allocate another transfer, not in use yet; return whether there is memory."""
        cdef Transfer *transfer = <Transfer *>zeroed(1, sizeof(Transfer))
        if transfer != NULL:
            transfer.requests = <MPI_Request *>zeroed(self.blocks.count, sizeof(MPI_Request))
        if transfer == NULL or transfer.requests == NULL:
            free(transfer)
            self.error = MPI_ERR_NO_MEM
            return False
        self._put_aside(transfer)
        return True

    cdef void _put_aside(self, Transfer *transfer) noexcept nogil:
        transfer.next = self.idle
        self.idle = transfer
        self.spare += 1

    cdef Transfer *_new_transfer(self, TransferList *among, int peer) noexcept nogil:
        cdef Transfer *transfer = self.idle
        cdef MPI_Request *requests = transfer.requests
        self.idle = transfer.next
        self.spare -= 1
        memset(transfer, 0, sizeof(Transfer))
        transfer.requests = requests
        transfer.peer = peer
        if among.first == NULL:
            among.first = transfer
        else:
            among.last.next = transfer
        among.last = transfer
        return transfer

    cdef void _move_in_memory(self) noexcept nogil:
        """Offer and copy the blocks of models in memory that ranks share, as far as possible."""
        cdef Transfer *transfer = self.outgoing.first
        while transfer != NULL:
            if transfer.in_memory:
                self._offer(transfer)
            transfer = transfer.next
        self._remove_done(&self.outgoing)
        # The memory of dropped vectors is recycled before others need some.
        transfer = self.incoming.first
        while transfer != NULL:
            if transfer.dropped and not transfer.by_mpi:
                self._release_dropped(transfer)
            transfer = transfer.next
        self._remove_done(&self.incoming)
        transfer = self.incoming.first
        while transfer != NULL:
            if transfer.in_memory and transfer.complete < self.blocks.count:
                self._copy_offered(transfer)
            transfer = transfer.next

    cdef void _offer(self, Transfer *transfer) noexcept nogil:
        """Offer the blocks that are ready, and note which the receiver has released."""
        cdef unsigned long long released
        if transfer.begun < transfer.ready and self._is_next(&self.outgoing, transfer):
            transfer.begun = transfer.ready
            self.queues.offer(transfer.peer, transfer.before + transfer.begun)
        released = self.queues.released(transfer.peer)
        if released > transfer.before + transfer.complete:
            # Blocks that the receiver does not need, it may have released before they were offered.
            released = min(released - transfer.before, <unsigned long long>transfer.begun)
            self.moved += <int>released - transfer.complete
            transfer.complete = <int>released
        transfer.used = transfer.complete

    cdef void _release_dropped(self, Transfer *transfer) noexcept nogil:
        """End a vector that no step will use: its sender may overwrite all blocks."""
        if transfer.complete < self.blocks.count and self._is_oldest_in_memory(transfer):
            self.use(transfer, self.blocks.count - 1)
            self.moved += 1
        transfer.used = transfer.complete

    cdef void _copy_offered(self, Transfer *transfer) noexcept nogil:
        """Copy the blocks that are offered and have memory."""
        cdef int block, begun = transfer.begun, end
        if not self.offers(transfer, begun) or not self._has_memory(transfer):
            return
        end = <int>min(self.queues.offered(transfer.peer) - transfer.before,
                       <unsigned long long>self.blocks.count)
        # A call that comes meanwhile waits for no more than that.
        end = min(end, (transfer.used if transfer.in_turns else begun) + DEPTH)
        for block in range(begun, end):
            self.layout.space.copy(
                self.place(transfer, block), self.show(transfer, block), self.blocks.size(block))
            self._pass(transfer, block)
        self.moved += end - begun

    cdef bint offers(self, Transfer *transfer, int block) noexcept nogil:
        """Return whether a step may use this block, the next, where its sender has it."""
        return (transfer.in_memory and self._is_oldest_in_memory(transfer)
                and self.queues.offered(transfer.peer) > transfer.before + block)

    cdef char *show(self, Transfer *transfer, int block) noexcept nogil:
        """Return where the sender has a block that it `offers`."""
        return self.queues.models[transfer.peer] + self.blocks.begin(block)

    cdef void use(self, Transfer *transfer, int block) noexcept nogil:
        """Note that a step has used a block."""
        transfer.used = block + 1
        if transfer.complete <= block:
            self._pass(transfer, block)

    cdef void _pass(self, Transfer *transfer, int block) noexcept nogil:
        """Let the sender overwrite a block that it has offered, and those before it."""
        transfer.begun = transfer.complete = block + 1
        self.queues.release(transfer.peer, transfer.before + transfer.complete)

    cdef bint _is_oldest_in_memory(self, Transfer *transfer) noexcept nogil:
        """Return whether all models that the rank has sent before in memory are complete."""
        cdef Transfer *each = self.incoming.first
        while each != transfer:
            if (each.peer == transfer.peer and each.in_memory
                    and each.complete < self.blocks.count):
                return False
            each = each.next
        return True

    cdef void _move_blocks(self) noexcept nogil:
        cdef Transfer *transfer = self.outgoing.first
        while transfer != NULL:
            if not transfer.in_memory:
                self._move_out(transfer)
            transfer = transfer.next
        self._remove_done(&self.outgoing)
        self._finish_dropped()
        transfer = self.incoming.first
        while transfer != NULL:
            if not transfer.in_memory:
                self._move_in(transfer)
            transfer = transfer.next
        self._remove_done(&self.incoming)

    cdef void _move_out(self, Transfer *transfer) noexcept nogil:
        cdef int block
        if transfer.begun < transfer.ready and self._is_next(&self.outgoing, transfer):
            for block in range(transfer.begun, transfer.ready):
                check(&self.error, MPI_Isend(
                    self.place(transfer, block), <int>self.blocks.size(block), MPI_BYTE,
                    transfer.peer, BLOCK_TAG, self.comm, &transfer.requests[block]))
            transfer.begun = transfer.ready
        self._complete(transfer)
        transfer.used = transfer.complete
        if transfer.back != NULL:
            transfer.back.used = transfer.complete

    cdef void _finish_dropped(self) noexcept nogil:
        """Recycle the memory of dropped vectors, before other vectors need some."""
        cdef Transfer *transfer = self.incoming.first
        while transfer != NULL:
            if transfer.dropped and not transfer.in_memory:
                self._complete(transfer)
                transfer.used = transfer.complete
            transfer = transfer.next
        self._remove_done(&self.incoming)

    cdef void _move_in(self, Transfer *transfer) noexcept nogil:
        cdef int block, end = self.blocks.count
        if transfer.begun < end and self._has_memory(transfer):
            if transfer.in_turns or transfer.folded:
                end = min(end, transfer.used + DEPTH)
            for block in range(transfer.begun, end):
                check(&self.error, MPI_Irecv(
                    self.place(transfer, block), <int>self.blocks.size(block), MPI_BYTE,
                    transfer.peer, BLOCK_TAG, self.comm, &transfer.requests[block]))
            transfer.begun = end
        self._complete(transfer)
        if transfer.dropped:
            transfer.used = transfer.complete

    cdef bint _has_memory(self, Transfer *transfer) noexcept nogil:
        """Return whether an incoming vector has memory; allocate it in the order of sending."""
        cdef bint wanted = transfer.claimed or transfer.dropped
        if transfer.memory != NULL:
            return True
        if not self._is_next(&self.incoming, transfer) or not (
                wanted or self.takes_ahead and self._has_turn(transfer)):
            return False
        if transfer.dropped:
            transfer.memory = self.discarded
            transfer.folded = True
            return True
        transfer.in_turns = wanted and self.blocks.count > DEPTH
        transfer.space = self.allocate(TURNS if transfer.in_turns else WHOLE)
        if transfer.space == NULL:
            return False
        transfer.memory = transfer.space.memory
        return True

    cdef bint _has_turn(self, Transfer *transfer) noexcept nogil:
        """Return whether no earlier vector from the same rank is kept until it is used."""
        cdef Transfer *each = self.incoming.first
        while each != transfer:
            if each.peer == transfer.peer and not (each.dropped or self.takes_all):
                return False
            each = each.next
        return True

    cdef bint _is_next(self, TransferList *among, Transfer *transfer) noexcept nogil:
        """Return whether all earlier vectors of the same rank are begun; dropped ones, complete."""
        cdef Transfer *each = among.first
        while each != transfer:
            if each.peer == transfer.peer and self.blocks.count > (
                    each.complete if each.dropped else each.begun):
                return False
            each = each.next
        return True

    cdef void _complete(self, Transfer *transfer) noexcept nogil:
        """Test which blocks are complete, in order."""
        cdef int done = 1
        while transfer.complete < transfer.begun:
            check(&self.error, MPI_Test(
                &transfer.requests[transfer.complete], &done, MPI_STATUS_IGNORE))
            if not done:
                return
            transfer.complete += 1
            self.moved += 1

    cdef void _remove_done(self, TransferList *among) noexcept nogil:
        cdef Transfer *before = NULL
        cdef Transfer *transfer = among.first
        cdef Transfer *following
        while transfer != NULL:
            following = transfer.next
            if transfer.used < self.blocks.count:
                before = transfer
            else:
                if before == NULL:
                    among.first = following
                else:
                    before.next = following
                if among.last == transfer:
                    among.last = before
                if transfer.space != NULL:
                    self.recycle(transfer.space)
                    transfer.space = NULL
                self.by_mpi -= transfer.by_mpi
                self._put_aside(transfer)
            transfer = following

    cdef bint is_busy(self) noexcept nogil:
        cdef Transfer *transfer = self.incoming.first
        if Messages.is_busy(self) or self.outgoing.first != NULL:
            return True
        while transfer != NULL:
            if transfer.claimed or transfer.dropped or (
                    transfer.complete < self.blocks.count and self._has_turn(transfer)):
                return True
            transfer = transfer.next
        return False

    cdef bint waits_for(self, int rank) noexcept nogil:
        """Return whether blocks from or to this rank are awaited."""
        cdef Transfer *transfer = self.outgoing.first
        while transfer != NULL:
            if transfer.peer == rank:
                return True
            transfer = transfer.next
        transfer = self.incoming.first
        while transfer != NULL:
            if transfer.peer == rank and transfer.claimed and transfer.complete < self.blocks.count:
                return True
            transfer = transfer.next
        return False

    cdef void end(self) noexcept nogil:
        Messages.end(self)
        self.drop_all()

    cdef bint is_over(self) noexcept nogil:
        return (Messages.is_over(self)
                and self.incoming.first == NULL and self.outgoing.first == NULL)
