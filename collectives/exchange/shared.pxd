from collectives.protocols.groups cimport Groups
from collectives.exchange.reduction cimport Reduction
from collectives.exchange.shared_memory cimport Part, SharedMemory
from collectives.memory.layout cimport Layout
from collectives.protocols.claims cimport ClaimsProtocol

cdef enum:
    # Blocks that a rank publishes ahead of need, that it averages before it polls its messages
    # again, and that a ring holds. With more, the first ones would have left the cache.
    AHEAD = 8

cdef struct Averaging:
    # A block that this rank averages: its exchange's number, and the ticket of its passes.
    long long number, ticket
    Py_ssize_t block, blocks
    int size
    int *members
    double total

cdef class Shared:
    cdef Reduction reduction
    cdef Layout layout
    cdef Groups groups
    cdef ClaimsProtocol claims
    cdef int rank, size
    cdef Py_ssize_t length
    cdef SharedMemory memory
    # By rank, NULL on other nodes.
    cdef Part **parts
    cdef bint everywhere
    cdef readonly bint works
    # `shift`: what to add to a number for the version that users see. `oldest`: the number of the
    # first version after the last operation.
    cdef long long shift, oldest
    # The exchange that this rank is in: its first member, the bytes and number of its blocks, how
    # many of them have been copied from the application (with the tickets `copies`), how many of
    # those are published, and how many have been returned to the application.
    cdef long long number
    cdef bint together, given
    cdef int first, own_size
    cdef int *own_members
    cdef char **user
    cdef Py_ssize_t own_block, own_blocks, copied, published, returned
    cdef long long copies[AHEAD]
    # The part begins in state `entry` once the passes of `entry_ticket` are complete.
    cdef unsigned long long entry
    cdef long long entry_ticket
    # A circular queue of the blocks that this rank averages; they end in order.
    cdef Averaging averaging[AHEAD]
    cdef int first_averaging, count_averaging
    # The exchange of which a block is averaged next.
    cdef Py_ssize_t block, blocks
    cdef int *members
    cdef double *shares
    cdef const char **vectors

    cdef char *_in_ring(self, int rank, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil
    cdef char *_source(self, int rank, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil
    cdef char *_target(self, int rank, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil
    cdef bint joins(self, const int *members, int size) noexcept nogil
    cdef void describe(
        self, bint in_place, bint saves, double weight, double weight_after) noexcept nogil
    cdef void open(self, long long number) noexcept nogil
    cdef bint close(self) noexcept nogil
    cdef long long reached(self) noexcept nogil
    cdef void begin(
        self, long long number, bint together, const int *members, int size, char **user,
        bint given, bint ringed) noexcept nogil
    cdef void _enter(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef bint _advance(self) noexcept nogil
    cdef bint _copy_next_block(self) noexcept nogil
    cdef void _take_block(self, char *vector) noexcept nogil
    cdef void _publish_copies(self) noexcept nogil
    cdef bint _return_block(self) noexcept nogil
    cdef Py_ssize_t _end_of(self, Py_ssize_t block) noexcept nogil
    cdef void _copy_block(self, Py_ssize_t block, char *vector, bint publishes) noexcept nogil
    cdef void adopt(self, char **kept) noexcept nogil
    cdef bint uses(self) noexcept nogil
    cdef bint needs_messages(self, long long number) noexcept nogil
    cdef bint help(self, int rank, long long number) noexcept nogil
    cdef Py_ssize_t _block_for(self, int size) noexcept nogil
    cdef void _divide(self, int size) noexcept nogil
    cdef bint _average_block(self, long long number, int size) noexcept nogil
    cdef void end_blocks(self) noexcept nogil
    cdef double _weigh(self, int size) noexcept nogil
    cdef void _average(self, Py_ssize_t block, int size) noexcept nogil
    cdef void _finish(self, const int *members, int size, double total) noexcept nogil
