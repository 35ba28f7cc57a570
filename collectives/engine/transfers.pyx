# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Vectors that follow messages from one rank to another, in blocks.

Blocks are sent from the vector itself and received where they are used: a receive is posted once
there is memory for the block, which takes none before that. Where a vector is used at once a few
blocks at a time have memory, else all. A short vector is inside its message, and looks like one
whose blocks have all arrived.
"""

from libc.stdlib cimport calloc, free
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

from collectives.engine.messages cimport TURNS, WHOLE, Message, Messages, weight_in
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.blocks cimport Blocks
from collectives.memory.layout cimport Layout

cdef enum:
    TAG_OF_BLOCKS = 1
    # Bytes of a block; how many blocks have memory at a time where they are used at once.
    BLOCK = 1048576
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


cdef class Transfers(Messages):
    """Messages, and the vectors that follow them.

    Args:
        comm, layout, inside: see `Messages`.
    """

    def __init__(self, Comm comm, Layout layout, bint inside):
        Messages.__init__(self, comm, layout, inside)
        self.blocks = Blocks(layout, layout.size if self.inside else BLOCK)
        self.bytes[<int>TURNS] = DEPTH * self.blocks.length

    def __dealloc__(self):
        free_transfers(self.idle)
        free_transfers(self.incoming.first)
        free_transfers(self.outgoing.first)

    cdef void progress_blocks(self) noexcept nogil:
        """Send and receive all blocks that can be now."""
        pthread_mutex_lock(&mpi_mutex)
        self._move_blocks()
        pthread_mutex_unlock(&mpi_mutex)

    cdef Transfer *send(self, int destination, char *memory) noexcept nogil:
        """Begin to send a vector after its message; its blocks are sent once they are `ready`.

        Return NULL, with an error, where there is no memory.
        """
        cdef Transfer *transfer = self._new_transfer(&self.outgoing, destination)
        if transfer != NULL:
            transfer.memory = memory
        return transfer

    cdef Transfer *expect(self, Message *message) noexcept nogil:
        """Begin to receive the vector that is in, or follows, a message; NULL without memory."""
        cdef Transfer *transfer = self._new_transfer(&self.incoming, message.source)
        if transfer == NULL:
            return NULL
        transfer.weight = weight_in(message)[0]
        if message.room == WHOLE:
            transfer.space = message
            transfer.memory = message.memory
            transfer.begun = transfer.complete = self.blocks.count
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
        if transfer.in_turns:
            return transfer.memory + block % DEPTH * self.blocks.length
        return transfer.memory + self.blocks.begin(block)

    cdef Transfer *_new_transfer(self, TransferList *among, int peer) noexcept nogil:
        cdef Transfer *transfer = self.idle
        cdef MPI_Request *requests
        if transfer != NULL:
            self.idle = transfer.next
            requests = transfer.requests
        else:
            transfer = <Transfer *>calloc(1, sizeof(Transfer))
            requests = <MPI_Request *>calloc(self.blocks.count, sizeof(MPI_Request))
            if transfer == NULL or requests == NULL:
                free(transfer)
                free(requests)
                self.error = MPI_ERR_NO_MEM
                return NULL
        memset(transfer, 0, sizeof(Transfer))
        transfer.requests = requests
        transfer.peer = peer
        if among.first == NULL:
            among.first = transfer
        else:
            among.last.next = transfer
        among.last = transfer
        return transfer

    cdef void _move_blocks(self) noexcept nogil:
        cdef Transfer *transfer = self.outgoing.first
        while transfer != NULL:
            self._move_out(transfer)
            transfer = transfer.next
        self._remove_done(&self.outgoing)
        self._finish_dropped()
        transfer = self.incoming.first
        while transfer != NULL:
            self._move_in(transfer)
            transfer = transfer.next
        self._remove_done(&self.incoming)

    cdef void _move_out(self, Transfer *transfer) noexcept nogil:
        cdef int block
        if transfer.begun < transfer.ready and self._is_next(&self.outgoing, transfer):
            for block in range(transfer.begun, transfer.ready):
                self._check(MPI_Isend(
                    self.place(transfer, block), <int>self.blocks.size(block), MPI_BYTE,
                    transfer.peer, TAG_OF_BLOCKS, self.comm, &transfer.requests[block]))
            transfer.begun = transfer.ready
        self._complete(transfer)
        transfer.used = transfer.complete
        if transfer.back != NULL:
            transfer.back.used = transfer.complete

    cdef void _finish_dropped(self) noexcept nogil:
        """Recycle the memory of dropped vectors, before other vectors need some."""
        cdef Transfer *transfer = self.incoming.first
        while transfer != NULL:
            if transfer.dropped:
                self._complete(transfer)
                transfer.used = transfer.complete
            transfer = transfer.next
        self._remove_done(&self.incoming)

    cdef void _move_in(self, Transfer *transfer) noexcept nogil:
        cdef int block, end = self.blocks.count
        if transfer.begun < end and self._has_memory(transfer):
            if transfer.in_turns:
                end = min(end, transfer.used + DEPTH)
            for block in range(transfer.begun, end):
                self._check(MPI_Irecv(
                    self.place(transfer, block), <int>self.blocks.size(block), MPI_BYTE,
                    transfer.peer, TAG_OF_BLOCKS, self.comm, &transfer.requests[block]))
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
        """Return whether all earlier vectors with its rank are begun; complete, if dropped."""
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
            self._check(MPI_Test(
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
                transfer.next = self.idle
                self.idle = transfer
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
