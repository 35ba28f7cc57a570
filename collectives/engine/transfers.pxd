from mpi4py.libmpi cimport MPI_Request

from collectives.engine.messages cimport Message, Messages
from collectives.memory.blocks cimport Blocks

cdef struct Transfer:
    # A vector that is sent or received in blocks, or has arrived inside a message: the other rank,
    # and the weight in the message's header.
    int peer
    double weight
    # Where it is: a whole vector, or a few blocks in turns. `space` owns the memory; NULL: the
    # transfer does not.
    char *memory
    bint in_turns
    Message *space
    # Whether all blocks are in the same place, because their contents do not matter.
    bint folded
    # How many blocks may be sent, are begun, are complete, and are no longer needed; each block's
    # request.
    int ready, begun, complete, used
    MPI_Request *requests
    # Whether the receiver copies the blocks from the sender's model, in memory that both map; then,
    # how many blocks were sent so before, and those of an outgoing one that have been offered.
    bint in_memory
    unsigned long long before
    # Whether its blocks are MPI's.
    bint by_mpi
    # Of an incoming transfer: whether a step uses its blocks; whether none ever will.
    bint claimed, dropped
    # Of a transfer that is sent back from an incoming one's memory: the incoming one.
    Transfer *back
    Transfer *next
    # Of an outgoing transfer: the next one of the same blocks, to another rank.
    Transfer *sibling

cdef struct TransferList:
    Transfer *first
    Transfer *last

cdef class Transfers(Messages):
    cdef readonly Blocks blocks
    # Vectors may be received before they are used; more than one from a source at a time.
    cdef bint takes_ahead, takes_all
    # There is no more memory: see `abandon`.
    cdef bint abandoned
    # A block into which dropped vectors are received, and one of zeros.
    cdef char *discarded
    cdef char *zeros
    # Transfers not in use, and their number.
    cdef Transfer *idle
    cdef int spare
    cdef TransferList incoming, outgoing
    # By rank, the number of blocks that were sent to it in memory, and that it has sent so.
    cdef unsigned long long *shown
    cdef unsigned long long *seen
    # The number of transfers whose blocks are MPI's.
    cdef int by_mpi

    cdef void progress_blocks(self, bint advanced) noexcept nogil
    cdef Transfer *send(self, int destination, char *memory) noexcept nogil
    cdef void _note_in_memory(
        self, Transfer *transfer, bint in_memory, unsigned long long *blocks) noexcept nogil
    cdef void _move_in_memory(self) noexcept nogil
    cdef void _offer(self, Transfer *transfer) noexcept nogil
    cdef void _copy_offered(self, Transfer *transfer) noexcept nogil
    cdef bint offers(self, Transfer *transfer, int block) noexcept nogil
    cdef char *show(self, Transfer *transfer, int block) noexcept nogil
    cdef void use(self, Transfer *transfer, int block) noexcept nogil
    cdef void _pass(self, Transfer *transfer, int block) noexcept nogil
    cdef void _release_dropped(self, Transfer *transfer) noexcept nogil
    cdef bint _is_oldest_in_memory(self, Transfer *transfer) noexcept nogil
    cdef Transfer *expect(self, Message *message) noexcept nogil
    cdef Transfer *claim(self, int source) noexcept nogil
    cdef void drop_all(self) noexcept nogil
    cdef void abandon(self) noexcept nogil
    cdef void send_zeros(self, Transfer *transfer) noexcept nogil
    cdef bint has_spare(self, bint receiving) noexcept nogil
    cdef bint _add_spare(self) noexcept nogil
    cdef void _put_aside(self, Transfer *transfer) noexcept nogil
    cdef bint is_free(self, char *memory, int block) noexcept nogil
    cdef char *place(self, Transfer *transfer, int block) noexcept nogil
    cdef Transfer *_new_transfer(self, TransferList *among, int peer) noexcept nogil
    cdef void _move_out(self, Transfer *transfer) noexcept nogil
    cdef void _finish_dropped(self) noexcept nogil
    cdef void _move_in(self, Transfer *transfer) noexcept nogil
    cdef bint _has_memory(self, Transfer *transfer) noexcept nogil
    cdef bint _has_turn(self, Transfer *transfer) noexcept nogil
    cdef bint _is_next(self, TransferList *among, Transfer *transfer) noexcept nogil
    cdef void _complete(self, Transfer *transfer) noexcept nogil
    cdef void _remove_done(self, TransferList *among) noexcept nogil
    cdef bint waits_for(self, int rank) noexcept nogil
