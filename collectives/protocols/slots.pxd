cimport cython

from collectives.protocols.slots_port cimport SlotsPort

cdef extern from "_atomic.h" nogil:
    unsigned long long atomic_load(const unsigned long long *)
    void atomic_store(unsigned long long *, unsigned long long)

cdef enum:
    # Constants that the compiler knows.
    FILLED = 0
    READ = 32
    APART = 16
    WORDS = 48
    SLOTS = 2
    CURRENT = 2

@cython.final
cdef class SlotsProtocol:
    cdef SlotsPort port
    cdef unsigned long long **words
    # Three lists of as many ranks as there are, `most`.
    cdef int *members
    cdef int most
    cdef int rank, slot, size, filled
    cdef long long number
    cdef bint pending, given
    cdef long long numbers[SLOTS]
    cdef int sizes[SLOTS]

    cdef void attach(self, SlotsPort port)
    cdef int *place(self, int k) noexcept nogil
    cdef long long load(self, int rank, Py_ssize_t offset) noexcept nogil
    cdef void store(self, Py_ssize_t offset, unsigned long long value) noexcept nogil
    cdef void begin(self, long long number, const int *members, int size) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void give(self) noexcept nogil
    cdef bint is_read(self) noexcept nogil
    cdef void free_other(self) noexcept nogil
    cdef bint have_all_filled(self) noexcept nogil
