from collectives.protocols.groups cimport Groups
from collectives.exchange.reduction cimport Reduction
from collectives.memory.layout cimport Layout
from collectives.protocols.claims cimport ClaimsProtocol

cdef struct Part:
    # What its rank weighs, and will after an exchange; the weight of all members of the last one.
    double weight, weight_after, total
    # Whether the mean replaces the snapshot rather than the result vector, what was in the snapshot
    # is then to be in the result vector, and a mean has replaced it since; or whether both what is
    # averaged and the mean are in its ring, and neither vector is touched.
    bint in_place, saves, replaced, ringed

cdef class Shared:
    cdef Reduction reduction
    cdef Layout layout
    cdef Groups groups
    cdef ClaimsProtocol claims
    cdef int rank, size
    cdef Py_ssize_t length, begin_of_vectors, begin_of_ring
    # By rank, NULL on other nodes.
    cdef char **memory
    cdef Part **parts
    cdef list segments
    cdef bint everywhere
    cdef readonly bint works
    # What to add to a number for the version that users see; the number of the first version after
    # the last operation.
    cdef long long shift, oldest
    # The exchange that this rank is in: its first member, its blocks' bytes and number, and how
    # many of them the application has published and has got.
    cdef long long number
    cdef bint together, given
    cdef int first, own_size
    cdef int *own_members
    cdef char **user
    cdef Py_ssize_t own_block, own_blocks, published, returned
    # The one that is being averaged.
    cdef Py_ssize_t block, blocks
    cdef int *members
    cdef double *shares
    cdef const char **vectors

    cdef char *snapshot(self, int rank) noexcept nogil
    cdef char *result(self, int rank) noexcept nogil
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
    cdef bint progress(self) noexcept nogil
    cdef bint _advance(self) noexcept nogil
    cdef bint _publish_block(self) noexcept nogil
    cdef bint _return_block(self) noexcept nogil
    cdef Py_ssize_t _end_of(self, Py_ssize_t block) noexcept nogil
    cdef void _copy_block(self, Py_ssize_t block, char *vector, bint publishes) noexcept nogil
    cdef void adopt(self, char **kept) noexcept nogil
    cdef bint uses(self) noexcept nogil
    cdef bint needs_messages(self, long long number) noexcept nogil
    cdef bint help(self, int rank, long long number) noexcept nogil
    cdef void _divide(self, int size) noexcept nogil
    cdef bint _average_block(self, long long number, int size) noexcept nogil
    cdef double _weigh(self, int size) noexcept nogil
    cdef void _average(self, Py_ssize_t block, int size) noexcept nogil
    cdef void _finish(self, int size, double total) noexcept nogil
