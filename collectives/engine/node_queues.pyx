"""Queues in the memory of a node, one from each of its ranks to each other.

Messages are copied into a queue by their sender, and out of it by their receiver. The blocks of a
model are copied from the model itself: its rank offers them one after the other, and does not
overwrite a block that the receiver has not released yet.
"""

from libc.stdlib cimport free
from libc.string cimport memcpy

from collectives.memory.allocation cimport (
    HUGE_PAGE,
    LINE,
    Segment,
    round_up,
    try_to_allocate,
    zeroed,
)
from collectives.memory.layout cimport HEADER

cdef extern from "../protocols/_atomic.h" nogil:
    unsigned long long atomic_load(const unsigned long long *word)
    void atomic_store(unsigned long long *word, unsigned long long value)

cdef enum:
    # How many of the longest messages a queue has room for, how many of the shortest, and how many
    # of the longest, if it is not one in each, all queues of a rank.
    LONGEST = 3
    SHORTEST = 64
    AT_ALL = 48


cdef inline unsigned long long *word(char *queue, Word which) noexcept nogil:
    return <unsigned long long *>(queue + which * LINE)


cdef class NodeQueues:
    """This rank's queues, and its model, where others can copy it from.

    A message's length is a multiple of 64 bytes. An object that `Node.share` has not connected has
    no queues; its model is in memory all the same.

    Args:
        rank, size: this rank, and the number of ranks.
        ranks: those of this node, sorted.
        longest: bytes of the longest message.
        model: bytes of the model.
        wanted: whether to share memory at all.

    Attributes:
        in_use: whether this rank has queues to and from the other ranks of its node.
        everywhere: whether these are all the other ranks.
        longest: bytes of the model.
        missing: why this rank has no memory that others can map; None if it has.

    Raises:
        MemoryError: there is no memory for the model.
    """

    def __init__(self, int rank, int size, ranks, Py_ssize_t longest, Py_ssize_t model,
                 bint wanted):
        self.rank, self.size, self.ranks = rank, size, list(ranks)
        self.longest = model
        self.mapped = []
        self.incoming = <char **>zeroed(3 * size, sizeof(char *))
        self.others = <int *>zeroed(size, sizeof(int))
        if self.incoming == NULL or self.others == NULL:
            raise MemoryError
        self.outgoing = self.incoming + size
        self.models = self.incoming + 2 * size
        most = max(1, min(LONGEST, AT_ALL // len(self.ranks)))
        self.length = max(most * (LINE + longest), SHORTEST * 2 * LINE)
        self.distance = WORDS * LINE + self.length
        self.begin_of_model = round_up(LINE + len(self.ranks) * self.distance, HUGE_PAGE)
        if model < HUGE_PAGE // 8:
            self.begin_of_model = LINE + len(self.ranks) * self.distance
        if wanted:
            try:
                self.segment = Segment(self.begin_of_model + model, None, True)
                self.model = self.segment.address + self.begin_of_model
                return
            except (AttributeError, OSError) as error:  # memfd_create is Linux's
                self.missing = f"rank {rank} has no memory to share: {error}"
        self.model = self.owned = try_to_allocate(model)
        if self.owned == NULL:
            raise MemoryError(f"cannot allocate {model} bytes for the model of a collective")

    def __dealloc__(self):
        free(self.owned)
        free(self.incoming)
        free(self.others)

    # What `Node.share` calls

    @property
    def handles(self):
        """What the other ranks of the node map this rank's memory by."""
        return self.segment.handle if self.segment is not None else None

    def map(self, handles):
        """Map the memory of the node's other ranks, given a dict from ranks to their handles."""
        cdef Segment segment
        cdef int rank, place
        for place, rank in enumerate(self.ranks):
            if rank == self.rank:
                continue
            segment = Segment(self.segment.size, handles[rank], True)
            self.mapped.append(segment)
            self.outgoing[rank] = self.segment.address + LINE + place * self.distance
            self.incoming[rank] = (
                segment.address + LINE + self.ranks.index(self.rank) * self.distance)
            self.models[rank] = segment.address + self.begin_of_model
            self.others[self.count] = rank
            self.count += 1

    def use(self, bint copies):
        """Use the queues from now on, all ranks of the node having mapped each other's memory."""
        self.segment.close()
        self.in_use = True
        self.everywhere = self.count == self.size - 1

    def unmap(self):
        """Have no queues, as a rank of the node could not map others' memory."""
        self.count = 0
        self.mapped = []
        if self.segment is not None:
            self.segment.close()

    # Messages

    cdef bint reaches(self, int rank) noexcept nogil:
        """Return whether there are queues to and from this rank."""
        return self.in_use and self.outgoing[rank] != NULL

    cdef bint write(self, int destination, const char *message, Py_ssize_t length) noexcept nogil:
        """Write a message to a queue; return whether that had room for it."""
        cdef char *queue = self.outgoing[destination]
        cdef unsigned long long written = word(queue, WRITTEN)[0]
        cdef Py_ssize_t place
        if written + LINE + length - atomic_load(word(queue, READ)) > <size_t>self.length:
            return False
        place = <Py_ssize_t>(written % <size_t>self.length)
        (<Py_ssize_t *>(queue + WORDS * LINE + place))[0] = length
        place = (place + LINE) % self.length
        self._copy(queue, place, <char *>message, length, True)
        atomic_store(word(queue, WRITTEN), written + LINE + length)
        return True

    cdef Py_ssize_t next(self, int source) noexcept nogil:
        """Return the length of the next message from this rank; 0: none has come."""
        cdef char *queue = self.incoming[source]
        cdef unsigned long long read = word(queue, READ)[0]
        if atomic_load(word(queue, WRITTEN)) == read:
            return 0
        return (<Py_ssize_t *>(
            queue + WORDS * LINE + <Py_ssize_t>(read % <size_t>self.length)))[0]

    cdef void read(self, int source, char *message, Py_ssize_t length) noexcept nogil:
        """Read the next message from this rank, of this length."""
        cdef char *queue = self.incoming[source]
        cdef unsigned long long read = word(queue, READ)[0]
        cdef Py_ssize_t place = <Py_ssize_t>((read + LINE) % <size_t>self.length)
        self._copy(queue, place, message, length, False)
        atomic_store(word(queue, READ), read + LINE + length)

    cdef void _copy(
        self, char *queue, Py_ssize_t place, char *message, Py_ssize_t length, bint writes
    ) noexcept nogil:
        """Copy a message into a queue or out of it, from or to this place on."""
        cdef char *content = queue + WORDS * LINE
        cdef Py_ssize_t first = min(length, self.length - place)
        if writes:
            memcpy(content + place, message, first)
            memcpy(content, message + first, length - first)
        else:
            memcpy(message, content + place, first)
            memcpy(message + first, content, length - first)

    # Blocks of models, numbered from the first of the first model that was sent to a rank

    cdef void offer(self, int destination, unsigned long long blocks) noexcept nogil:
        """Offer this rank's blocks up to this number."""
        atomic_store(word(self.outgoing[destination], OFFERED), blocks)

    cdef unsigned long long offered(self, int source) noexcept nogil:
        return atomic_load(word(self.incoming[source], OFFERED))

    cdef void release(self, int source, unsigned long long blocks) noexcept nogil:
        """Let a rank overwrite its blocks up to this number: they are copied, or not needed."""
        atomic_store(word(self.incoming[source], COPIED), blocks)

    cdef unsigned long long released(self, int destination) noexcept nogil:
        return atomic_load(word(self.outgoing[destination], COPIED))
