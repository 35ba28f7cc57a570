from collectives.memory.allocation cimport Segment

cdef enum Word:
    # The words of a queue, a line each: bytes that its sender has written and its receiver has
    # read; blocks of the sender's model that it has offered and that the receiver has copied.
    WRITTEN
    READ
    OFFERED
    COPIED
    WORDS

cdef class NodeQueues:
    # Whether queues are in use, and whether every other rank has one.
    cdef readonly bint in_use, everywhere
    cdef readonly Py_ssize_t longest
    cdef readonly object missing
    cdef int rank, size
    # Bytes of a queue, and of one with its words; where the model is in a segment.
    cdef Py_ssize_t length, distance, begin_of_model
    cdef list ranks
    cdef Segment segment
    cdef list mapped
    # By rank, NULL on other nodes: the queues from and to it, and its model.
    cdef char **incoming
    cdef char **outgoing
    cdef char **models
    # The node's other ranks, and how many these are.
    cdef int *others
    cdef int count
    # This rank's model; the same if it is not in the segment.
    cdef char *model
    cdef char *owned

    cdef bint reaches(self, int rank) noexcept nogil
    cdef bint write(self, int destination, const char *message, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t next(self, int source) noexcept nogil
    cdef void read(self, int source, char *message, Py_ssize_t length) noexcept nogil
    cdef void offer(self, int destination, unsigned long long blocks) noexcept nogil
    cdef unsigned long long offered(self, int source) noexcept nogil
    cdef void _copy(
        self, char *queue, Py_ssize_t place, char *message, Py_ssize_t length, bint writes
    ) noexcept nogil
    cdef void release(self, int source, unsigned long long blocks) noexcept nogil
    cdef unsigned long long released(self, int destination) noexcept nogil
