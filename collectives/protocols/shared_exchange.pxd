cimport cython

from collectives.protocols.claims cimport (
    AVERAGED,
    CLOSED,
    EMPTY,
    FLOWING,
    GATHERED,
    KEPT,
    MISSING,
    OPEN,
    PENDING,
    RINGED,
    UNKNOWN,
    ClaimsProtocol,
    number_of,
    state_of,
)
from collectives.protocols.shared_exchange_port cimport SharedExchangePort

cdef enum:
    # Blocks ahead, in compiled code. With more, the first ones would have left the cache.
    AHEAD = 8
    # Constants that the compiler knows.
    NOWHERE = 0
    SNAPSHOT
    RESULT
    RING
    WINDOW
    OWN = 0
    OTHER
    FIRST_BLOCK

cdef int DEEPEST

cdef int source_of(bint ringed, bint shows) noexcept nogil
cdef int target_of(bint ringed, bint in_place, bint takes) noexcept nogil

@cython.final
cdef class AveragedBlocks:
    cdef long long numbers[AHEAD]
    cdef long long tickets[AHEAD]
    cdef Py_ssize_t blocks[AHEAD]
    cdef Py_ssize_t of[AHEAD]
    cdef double totals[AHEAD]
    cdef int sizes[AHEAD]
    cdef int first, count

@cython.final
cdef class SharedExchangeProtocol:
    cdef SharedExchangePort port
    cdef ClaimsProtocol claims
    cdef AveragedBlocks averaging
    # Of as many ranks as there are, `most`.
    cdef int *members
    cdef int most
    cdef int rank, ahead, patience, looks, own_size, own_place, first
    cdef long long oldest, number, entry_ticket
    cdef bint together, lent, receives, ringed, shows, gets, withdrawing, holding, hidden
    cdef bint reserving, shared_out
    cdef long long held
    cdef Py_ssize_t own_blocks, copied, published, returned, reserved, next_reserved
    cdef long long copies[AHEAD]
    cdef unsigned long long entry, entered

    cdef void attach(self, SharedExchangePort port)
    cdef int *place(self, int k) noexcept nogil
    cdef Py_ssize_t slot(self, Py_ssize_t k) noexcept nogil
    cdef void open(self, long long number) noexcept nogil
    cdef bint close(self) noexcept nogil
    cdef long long reached(self) noexcept nogil
    cdef bint is_pending(self) noexcept nogil
    cdef void begin(
        self, long long number, bint together, const int *members, int size, bint lent,
        bint receives, bint ringed, bint windowed, bint keeps) noexcept nogil
    cdef void enter(self) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef bint advance(self) noexcept nogil
    cdef bint contribute_next(self) noexcept nogil
    cdef void reserve(self) noexcept nogil
    cdef bint has_reserved(self, Py_ssize_t block) noexcept nogil
    cdef bint owns(self, Py_ssize_t block) noexcept nogil
    cdef Py_ssize_t near(self) noexcept nogil
    cdef void contribute_block(self) noexcept nogil
    cdef void publish(self) noexcept nogil
    cdef bint return_next(self) noexcept nogil
    cdef void adopt(self) noexcept nogil
    cdef void withdraw(self) noexcept nogil
    cdef bint is_undisturbed(self) noexcept nogil
    cdef void let_go(self) noexcept nogil
    cdef bint needs_messages(self, long long number) noexcept nogil
    cdef bint average_reserved(self) noexcept nogil
    cdef bint is_shared_out(self) noexcept nogil
    cdef bint help(self, int rank, long long number) noexcept nogil
    cdef bint may_help(self, long long earlier, long long number) noexcept nogil
    cdef bint average_next(
        self, long long number, const int *members, int size) noexcept nogil
    cdef void average_block(
        self, long long number, const int *members, int size, Py_ssize_t block, Py_ssize_t blocks,
        bint in_place) noexcept nogil
    cdef void end_blocks(self) noexcept nogil
    cdef void end_block(
        self, long long number, const int *members, int size, Py_ssize_t block,
        Py_ssize_t blocks, double total) noexcept nogil
    cdef void finish(
        self, long long number, const int *members, int size, double total) noexcept nogil
    cdef void set_total(self, const int *members, int size, double total) noexcept nogil
