from mpi4py.libmpi cimport MPI_Request

from collectives.engine.messages cimport Message, Messages
from collectives.memory.blocks cimport Blocks

cdef struct Transfer:
    # A vector that travels in blocks, or one that has come in a message: with which rank, and what
    # its header says of its weight.
    int peer
    double weight
    # Where it is, a whole vector or the blocks on their way in turns; the memory is that of
    # `space`, or somebody else's (NULL).
    char *memory
    bint in_turns
    Message *space
    # How many blocks may be sent, are under way or through, are through, and are not needed any
    # more; each block's request.
    int ready, begun, complete, used
    MPI_Request *requests
    # Of one that comes: whether somebody uses its blocks; whether nobody ever will.
    bint claimed, dropped
    # What is sent instead of a block that has come, from where that was.
    Transfer *back
    Transfer *next
    # Of one that is sent: the next of those that the same blocks go to.
    Transfer *sibling

cdef struct TransferList:
    Transfer *first
    Transfer *last

cdef class Transfers(Messages):
    cdef readonly Blocks blocks
    # Vectors that nobody uses yet may come in now; more than one of a source at a time.
    cdef bint takes_ahead, takes_all
    cdef Transfer *idle
    cdef TransferList incoming, outgoing

    cdef void progress_blocks(self) noexcept nogil
    cdef Transfer *send(self, int destination, char *memory) noexcept nogil
    cdef Transfer *expect(self, Message *message) noexcept nogil
    cdef Transfer *claim(self, int source) noexcept nogil
    cdef void drop_all(self) noexcept nogil
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
