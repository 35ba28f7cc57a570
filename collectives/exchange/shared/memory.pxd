from collectives.memory.allocation cimport Memory, Segment
from collectives.memory.layout cimport Layout

cdef struct Part:
    # The rank's weight, its weight after an exchange, and the total weight of the last exchange.
    double weight, weight_after, total
    # in_place: the mean replaces the snapshot rather than the result vector. saves: the old
    # snapshot is then copied to the result vector. replaced: a mean has replaced the snapshot
    # since this was set. ringed: the contribution and the mean are in the ring, and neither vector
    # is touched. takes: the rank receives the mean.
    # filled: it contributes a vector, of any weight, rather than zeros in place of one.
    bint in_place, saves, replaced, ringed, takes, filled
    # Whether the snapshot and the result have changed places; only a closed part's rank changes it.
    bint swapped
    # Whether the application's arrays have the contribution, and get the mean.
    bint shows, gets
    # Its count, which an exchange replaces by the mean of the members'; that mean in the last
    # average over all ranks since this was set, and the number of this, −1 if there was none.
    double count, average_count
    long long average_number

cdef enum:
    ELSEWHERE = 1

cdef struct Place:
    # Where an array of the application is: the family of its window, and its offset there; or, with
    # ELSEWHERE as the family, its address in the rank's process.
    unsigned long long family
    Py_ssize_t offset

cdef struct Known:
    # A family, and where a rank's window of it begins here.
    unsigned long long family
    char *window

cdef class SharedMemory:
    cdef Layout layout
    cdef int rank, size
    cdef Py_ssize_t distance, begin_of_ring, begin_of_slots, begin_of_places
    # By rank, NULL on other nodes.
    cdef Part **parts
    cdef unsigned long long **words
    cdef unsigned long long **slot_words
    cdef Place **places
    # The ranks' processes, and some windows of each that were used before.
    cdef int *processes
    # Whether they may copy from and to each other's other memory.
    cdef bint copies
    cdef Known *known
    cdef char **vectors
    # This rank's memory, and the mapped memory of the others.
    cdef Segment segment
    cdef Memory exported
    cdef list segments, mapped

    cdef _place(self, int rank, Segment segment, char *vectors)
    cdef char *snapshot(self, int rank) noexcept nogil
    cdef char *result(self, int rank) noexcept nogil
    cdef char *ring(self, int rank) noexcept nogil
    cdef char *slot(self, int rank, int k) noexcept nogil
    cdef bint show(self, char **arrays) noexcept nogil
    cdef char *_window(self, int rank, unsigned long long family) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef char *array(self, int rank, int i) noexcept nogil
    cdef bint is_elsewhere(self, int rank, int i) noexcept nogil
