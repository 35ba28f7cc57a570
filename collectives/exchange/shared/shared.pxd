cimport cython

from collectives.exchange.reduction cimport Reduction
from collectives.exchange.shared.memory cimport Part, SharedMemory
from collectives.exchange.shared.slots cimport Slots
from collectives.exchange.transport cimport Transport
from collectives.memory.layout cimport Layout
from collectives.protocols.groups cimport Groups
from collectives.protocols.shared_exchange cimport SharedExchangeProtocol
from collectives.protocols.shared_exchange_port cimport SharedExchangePort

@cython.final
cdef class SharedBlocks(SharedExchangePort):
    cdef Reduction reduction
    cdef Layout layout
    cdef Groups groups
    cdef SharedMemory memory
    # By rank, NULL on other nodes.
    cdef Part **parts
    cdef int rank, size
    cdef Py_ssize_t length
    # What to add to a number for the version that users see.
    cdef long long shift
    # The application's arrays in this rank's exchange, those that `keep_arrays` takes in their
    # place, and the bytes of a block.
    cdef char **user
    # Where these are for `withdraw`, and what was saved of some when the application got them back.
    cdef char **shown
    cdef char *saved
    cdef char **kept
    cdef Py_ssize_t own_block, own_blocks
    # How many arrays that exchange averages, and whether this rank contributes a vector to it.
    cdef int own_averaged
    cdef bint own_filled
    # The bytes and number of blocks for as many members as `divided` says.
    cdef int divided
    cdef Py_ssize_t block, count
    # How many arrays are averaged, from the first on, and whether this rank's block is in place; and
    # of the block that is averaged, by member.
    cdef int averaged
    cdef bint in_place
    cdef double *shares
    cdef char **vectors
    cdef char **sources
    cdef char **targets
    cdef char **means
    # Buffers for parts of arrays that are in other processes, of `piece` bytes each: one for each
    # member, and one for the mean. elsewhere: whether the array that is averaged has such parts.
    cdef char *stage
    cdef Py_ssize_t piece
    cdef bint elsewhere

    cdef bint joins(self, const int *members, int size) noexcept nogil
    cdef void begin(self, long long number, bint together, char **user, int size) noexcept nogil
    cdef void save_arrays(self) noexcept nogil
    cdef int _averaged_in(self, long long number, bint together) noexcept nogil
    cdef void _divide(self, int size) noexcept nogil
    cdef char *_at(
        self, int rank, int place, int i, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil
    cdef char *_source(self, int rank, int i, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil
    cdef char *_target(self, int rank, int i, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil
    cdef char *_second_target(self, int rank, int i) noexcept nogil
    cdef Py_ssize_t _end_of(self, Py_ssize_t block) noexcept nogil
    cdef void _copy_block(self, Py_ssize_t block, char *vector, bint publishes) noexcept nogil
    cdef void _average(
        self, Py_ssize_t block, Py_ssize_t low, Py_ssize_t high, const int *members, int size
    ) noexcept nogil
    cdef void _average_part(
        self, int i, Py_ssize_t begin, Py_ssize_t n, const int *members, int size
    ) noexcept nogil
    cdef int copy_directly(self) except -1
    cdef bint _shows_elsewhere(self, int rank, int i) noexcept nogil
    cdef void _copy_from(
        self, int rank, char *to, const char *source, Py_ssize_t bytes) noexcept nogil
    cdef void _copy_to(
        self, int rank, char *to, const char *source, Py_ssize_t bytes) noexcept nogil
    cdef void _keep(
        self, int i, Py_ssize_t begin, Py_ssize_t bytes, const int *members, int size
    ) noexcept nogil

@cython.final
cdef class Shared(Transport):
    cdef SharedMemory memory
    cdef SharedBlocks blocks
    cdef SharedExchangeProtocol steps
    # This rank's.
    cdef Part *part
    # The lists of ranks that `steps` uses.
    cdef int *members
    # None if vectors are too long, or others begin this rank's part.
    cdef Slots slots

    cdef bint by_slots(self, int size) noexcept nogil
    cdef void describe(
        self, bint in_place, bint saves, bint filled, double weight, double weight_after, double count
    ) noexcept nogil
    cdef void begin(
        self, long long number, bint together, const int *members, int size, char **user,
        bint lent, bint ringed, bint keeps) noexcept nogil
