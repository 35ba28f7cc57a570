from collectives.memory.layout cimport Layout
from collectives.protocols.contribution cimport Vectors

cdef class HostVectors(Vectors):
    cdef Layout layout
    # Whether X is finite, if a device has checked it: 1 or 0; else UNKNOWN.
    cdef int finite
    # For each of the rank's vectors, the addresses of its arrays; NULL if there is no such vector.
    cdef char **of[5]
    # Where each of the rank's own vectors begins (they are contiguous); their arrays' addresses.
    cdef char *start[5]
    cdef char **located
    # Tells the ranks that map this memory whether the snapshot and the result have changed places;
    # NULL: no others do.
    cdef bint *swapped
    # The memory allocated for them.
    cdef list memories
    # A device's answer to whether X, or its change, is finite; `asked`: whether that is pending;
    # `answered`: the ticket of the answer.
    cdef int *change_finite
    cdef bint asked
    cdef long long answered
    # The arrays of which the rank has a part (see `protocols.lease`), and the part's addresses.
    cdef int part_begin, part_end
    cdef char **part

    cdef int have_part(self, int begin, int end) except -1
    cdef char *allocate(self, int vector, int count) except NULL
    cdef void place(self, int vector, char *memory) noexcept nogil
    cdef char **arrays(self, int vector) noexcept nogil
    cdef bint knows_finite(self, char **x) noexcept nogil
    cdef bint knows_change(self) noexcept nogil
    cdef void _add_part(self, double times) noexcept nogil
