cdef extern from "_atomic.h" nogil:
    unsigned long long atomic_load(const unsigned long long *)
    bint atomic_swap(unsigned long long *, unsigned long long, unsigned long long)

cdef unsigned long long CLOSED, OPEN, TAKEN, KEPT, FLOWING, RINGED
cdef Py_ssize_t PART, HANDED_OUT, ENDED, PUBLISHED, RESERVED, BLOCKS
cdef int MISSING, GATHERED, OVER
cdef int PENDING, EMPTY, AVERAGED, UNKNOWN
cdef int STATE_BITS, BLOCK_BITS

cdef unsigned long long word_of(unsigned long long number, unsigned long long state) noexcept nogil
cdef unsigned long long number_of(unsigned long long word) noexcept nogil
cdef unsigned long long state_of(unsigned long long word) noexcept nogil

cdef class ClaimsProtocol:
    cdef unsigned long long **words
    cdef readonly int missing

    cdef unsigned long long load(self, int rank, Py_ssize_t offset) noexcept nogil
    cdef bint swap(
        self, int rank, Py_ssize_t offset, unsigned long long old, unsigned long long new
    ) noexcept nogil
    cdef unsigned long long state(self, int rank) noexcept nogil
    cdef unsigned long long number(self, int rank) noexcept nogil
    cdef void set(
        self, int rank, unsigned long long number, unsigned long long state) noexcept nogil
    cdef void publish(
        self, int rank, unsigned long long number, unsigned long long blocks) noexcept nogil
    cdef void reserve(
        self, int rank, unsigned long long number, unsigned long long block) noexcept nogil
    cdef unsigned long long close(self, int rank) noexcept nogil
    cdef int gather(self, unsigned long long number, const int *members, int size) noexcept nogil
    cdef long long reserved(self, int rank, unsigned long long number) noexcept nogil
    cdef int gather_rings(
        self, unsigned long long number, const int *members, int size) noexcept nogil
    cdef bint is_reserved(
        self, unsigned long long number, const int *members, int size, unsigned long long block
    ) noexcept nogil
    cdef long long unreserved(
        self, unsigned long long number, const int *members, int size, unsigned long long blocks
    ) noexcept nogil
    cdef long long published(
        self, unsigned long long number, const int *members, int size, unsigned long long blocks
    ) noexcept nogil
    cdef long long handed_out(self, unsigned long long number, int first) noexcept nogil
    cdef long long claim(
        self, unsigned long long number, const int *members, int size, unsigned long long blocks
    ) noexcept nogil
    cdef long long hold(
        self, unsigned long long number, int first, unsigned long long blocks) noexcept nogil
    cdef void let_go(
        self, unsigned long long number, int first, unsigned long long claimed,
        unsigned long long blocks) noexcept nogil
    cdef long long ended(self, unsigned long long number, int first) noexcept nogil
    cdef bint has_come(self, int rank, unsigned long long number) noexcept nogil
    cdef bint change(
        self, int rank, unsigned long long number, unsigned long long old, unsigned long long new
    ) noexcept nogil
    cdef bint end(
        self, unsigned long long number, int first, Py_ssize_t block, unsigned long long blocks,
        unsigned long long fate) noexcept nogil
    cdef int fate(self, unsigned long long number, int first, Py_ssize_t block) noexcept nogil
    cdef void release(
        self, unsigned long long number, const int *members, int size) noexcept nogil
