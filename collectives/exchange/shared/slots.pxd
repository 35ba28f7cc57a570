from collectives.exchange.reduction cimport Reduction
from collectives.exchange.shared.memory cimport Part, SharedMemory
from collectives.exchange.transport cimport Transport
from collectives.memory.layout cimport Layout
from collectives.protocols.slots cimport SlotsProtocol
from collectives.protocols.slots_port cimport SlotsPort

cdef bint has_slots(Py_ssize_t length) noexcept

cdef struct Given:
    # What is with a vector in a slot: the exchange plus 1, and the member's weight and count.
    unsigned long long filled
    double weight, count

cdef class SlotVectors(SlotsPort):
    cdef Reduction reduction
    cdef Layout layout
    cdef SharedMemory memory
    # This rank's.
    cdef Part *part
    cdef int rank
    # The application's arrays; `lent`: they are averaged; `ringed`: the rank's own are not used.
    cdef char **user
    cdef bint lent, ringed
    # How many arrays are averaged, from the first on.
    cdef int averaged
    cdef double *shares
    cdef char **vectors

    cdef Given *given(self, int rank, int slot) noexcept nogil
    cdef void keep(self) noexcept nogil
    cdef double _weigh(self, int slot, const int *members, int size) noexcept nogil
    cdef void _average_array(
        self, int i, int slot, const int *members, int size) noexcept nogil
    cdef void _keep_array(self, int i) noexcept nogil

cdef class Slots(Transport):
    cdef SlotVectors vectors
    cdef SlotsProtocol steps
    cdef int *members
    # The longest vectors of two members, and of more.
    cdef Py_ssize_t longest_of_two, longest

    cdef bint suit(self, int size) noexcept nogil
    cdef void begin(
        self, long long number, const int *members, int size, char **user, bint lent, bint ringed,
        int averaged) noexcept nogil
    cdef set readers(self)
