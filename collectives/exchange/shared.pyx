# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""An allreduce among ranks of one node, in shared memory.

Members that have arrived average the vector block by block, directly from all snapshots to the
destination of each member's mean. A member that computes need not take part: see
`protocols.claims`. A member that is present until the end may have its blocks in a short ring
instead, which stays in cache.
"""

from libc.stdlib cimport free
from libc.string cimport memcpy

from collectives.memory.allocation cimport zeroed
from collectives.protocols.groups cimport Groups
from collectives.exchange.clock cimport now
from collectives.exchange.reduction cimport Reduction
from collectives.exchange.shared_memory cimport Part, SharedMemory
from collectives.memory.layout cimport HEADER
from collectives.protocols.claims cimport (
    AVERAGED,
    BLOCKS,
    CLOSED,
    EMPTY,
    FLOWING,
    GATHERED,
    KEPT,
    MISSING,
    OPEN,
    PENDING,
    UNKNOWN,
    ClaimsProtocol,
    number_of,
    state_of,
)
from collectives.protocols.slicing cimport most_shared_blocks, shared_block

cdef enum:
    # Elements per pass, so that the next pass finds the result in the first-level cache.
    CHUNK = 1024
    # Longest chain of exchanges of which each waits for an earlier one.
    DEEPEST = 64


cdef class Shared:
    """This rank's part in its own exchanges on the node, and its help with those of other ranks.

    Args:
        groups: the members of each exchange, used for the groups of other ranks, too; None if
            members know only their own groups, and all are present in each exchange.
        rank, size: this rank, and number of ranks.
        vectors: whether to have a snapshot and a result vector.
        rings: whether to have a ring.
    """

    def __init__(
        self, Reduction reduction, Groups groups, int rank, int size, bint vectors, bint rings
    ):
        cdef Py_ssize_t ring
        cdef int k
        self.reduction = reduction
        self.layout = reduction.layout
        self.length = self.layout.size - HEADER
        self.groups = groups
        self.rank, self.size = rank, size
        # Sufficient for groups of any size: blocks are longest in the smallest.
        ring = min(AHEAD * self._block_for(2), self.length) if rings else 0
        self.memory = SharedMemory(
            self.layout, rank, size, BLOCKS + most_shared_blocks(self.length, size), vectors, ring)
        reduction.exported = vectors and self.layout.space.deferred
        self.parts = self.memory.parts
        self.claims = ClaimsProtocol(None)
        self.claims.words = self.memory.words
        self.members = <int *>zeroed((2 + AHEAD) * size, sizeof(int))
        self.own_members = self.members + size
        self.shares = <double *>zeroed(size, sizeof(double))
        self.vectors = <const char **>zeroed(size, sizeof(char *))
        if self.members == NULL or self.shares == NULL or self.vectors == NULL:
            raise MemoryError
        for k in range(AHEAD):
            self.averaging[k].members = self.members + (2 + k) * size

    def __dealloc__(self):
        free(self.members)
        free(self.shares)
        free(self.vectors)

    def map(self, handles):
        """Map the memory of the node's other ranks, given their handles by rank."""
        self.memory.map(handles)
        self.everywhere = len(handles) == self.size

    def use(self):
        """Share memory from now on: all ranks of the node have mapped all others'."""
        self.memory.close()
        self.works = True

    cdef char *_in_ring(self, int rank, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil:
        """Return where a vector would begin whose block of this size is in a rank's ring."""
        return self.memory.ring(rank) + block % AHEAD * bytes - (HEADER + block * bytes)

    cdef char *_source(self, int rank, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil:
        """Return the vector of which a rank contributes this block, of this size."""
        if self.parts[rank].ringed:
            return self._in_ring(rank, block, bytes)
        return self.memory.snapshot(rank)

    cdef char *_target(self, int rank, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil:
        """Return the vector in which a rank receives the mean of this block."""
        if self.parts[rank].ringed:
            return self._in_ring(rank, block, bytes)
        if self.parts[rank].in_place:
            return self.memory.snapshot(rank)
        return self.memory.result(rank)

    cdef bint joins(self, const int *members, int size) noexcept nogil:
        """Return whether these ranks can exchange their vectors in shared memory."""
        cdef int i
        if not self.works:
            return False
        if not self.everywhere:
            for i in range(size):
                if self.parts[members[i]] == NULL:
                    return False
        return True

    # This rank's part

    cdef void describe(
        self, bint in_place, bint saves, double weight, double weight_after
    ) noexcept nogil:
        """Set what an exchange does with this rank's vectors; the part must be closed."""
        self.parts[self.rank].ringed = False
        self.parts[self.rank].takes = True
        self.parts[self.rank].in_place = in_place
        self.parts[self.rank].saves = saves
        self.parts[self.rank].replaced = False
        self.parts[self.rank].weight = weight
        self.parts[self.rank].weight_after = weight_after

    cdef void open(self, long long number) noexcept nogil:
        """Let any member begin this rank's next part, and those after it."""
        self.claims.set(self.rank, number, OPEN)

    cdef bint close(self) noexcept nogil:
        """Close this rank's part to others; return whether it has begun, in exchange `number`."""
        cdef unsigned long long word = self.claims.close(self.rank)
        self.number = number_of(word)
        self.together = False
        self.given = False
        self.user = NULL
        self.entry = CLOSED
        self.copied = self.published = 0
        return state_of(word) == KEPT

    cdef long long reached(self) noexcept nogil:
        """Return the number of the exchange that this rank's part is opened for, or is in."""
        return self.claims.number(self.rank)

    cdef void begin(
        self, long long number, bint together, const int *members, int size, char **user,
        bint given, bint ringed
    ) noexcept nogil:
        """Begin this rank's part in an exchange; in one that is `together` every member does so.

        If `given`, the application's arrays, `user`, are published block by block; unless NULL,
        they receive the mean. `ringed`, by way of the ring alone, is possible if they do both, or
        if this rank has weight 0 and receives nothing.
        """
        cdef int i
        self.parts[self.rank].ringed = ringed
        self.parts[self.rank].takes = not ringed or user != NULL
        self.number = number
        self.together = together
        for i in range(size):
            self.own_members[i] = members[i]
        self.own_size = size
        self.first = members[0]
        self.user = user
        self.given = given
        self.copied = self.published = 0
        self.returned = 0
        self._divide(size)
        self.own_block, self.own_blocks = self.block, self.blocks
        self.entry = FLOWING if given else KEPT
        # Others may average the snapshot only once its passes are complete; the application's
        # blocks are published one by one.
        self.entry_ticket = self.layout.space.begun()
        self._enter()

    cdef void _enter(self) noexcept nogil:
        """Begin this rank's part if it is due and the passes over its vectors are complete."""
        if self.entry != CLOSED and self.layout.space.over(self.entry_ticket):
            self.claims.set(self.rank, self.number, self.entry)
            self.entry = CLOSED

    cdef bint progress(self) noexcept nogil:
        """Progress without blocking; return whether the mean is complete."""
        cdef int count
        self._enter()
        if self.entry != CLOSED:
            return False
        self._publish_copies()
        while self._copy_next_block():
            self.reduction.progress_count += 1
        self.end_blocks()
        for count in range(AHEAD):
            if self.reached() != self.number or not self._advance():
                break
            self.reduction.progress_count += 1
        while self._return_block():
            self.reduction.progress_count += 1
        if self.reached() == self.number or self.user != NULL and self.returned < self.own_blocks:
            return False
        self.reduction.weight = self.parts[self.rank].total
        return True

    cdef bint _advance(self) noexcept nogil:
        """Average a block of the exchange that this rank is in; return whether there was one."""
        cdef int i
        if not self.together:
            return self.help(self.rank, self.number)
        for i in range(self.own_size):
            self.members[i] = self.own_members[i]
        return (self.claims.gather(self.number, self.members, self.own_size) == GATHERED
                and self._average_block(self.number, self.own_size))

    cdef bint _copy_next_block(self) noexcept nogil:
        """Copy the application's next block if it is needed soon; return whether it was copied.

        In the ring it replaces a block that has been returned to the application.
        """
        cdef Py_ssize_t near
        if not self.given or self.copied == self.own_blocks:
            return False
        near = self.returned
        if not self.parts[self.rank].ringed:
            near = self.claims.handed_out(self.number, self.first)
        if (self.copied >= near + AHEAD
                or not self.reduction.has(self.user, self._end_of(self.copied))):
            return False
        self._take_block(self._source(self.rank, self.copied, self.own_block))
        self._publish_copies()
        return True

    cdef void _take_block(self, char *vector) noexcept nogil:
        """Copy the application's next block to this vector."""
        self._copy_block(self.copied, vector, True)
        # Among unpublished blocks, later ones have later tickets.
        self.copies[self.copied % AHEAD] = self.layout.space.begun()
        self.copied += 1

    cdef void _publish_copies(self) noexcept nogil:
        """Let others average the blocks whose copies are complete."""
        cdef Py_ssize_t before = self.published
        while (self.published < self.copied
               and self.layout.space.over(self.copies[self.published % AHEAD])):
            self.published += 1
        if self.published > before:
            self.claims.publish(self.rank, self.number, self.published)

    cdef bint _return_block(self) noexcept nogil:
        """Copy the next block of the mean to the application; return whether it was available."""
        cdef int fate
        if self.user == NULL or self.returned == self.own_blocks:
            return False
        fate = self.claims.fate(self.number, self.first, self.returned)
        if fate == UNKNOWN:
            fate = AVERAGED if self.parts[self.rank].total > 0 else EMPTY
        if fate == PENDING or not self.reduction.has(self.user, self._end_of(self.returned)):
            return False
        if fate == AVERAGED:
            self._copy_block(
                self.returned, self._target(self.rank, self.returned, self.own_block), False)
            self.reduction.give_back(self.user, self._end_of(self.returned))
        self.returned += 1
        return True

    cdef Py_ssize_t _end_of(self, Py_ssize_t block) noexcept nogil:
        """Return where a block of this rank's exchange ends in a vector."""
        return min(HEADER + (block + 1) * self.own_block, self.layout.size)

    cdef void _copy_block(self, Py_ssize_t block, char *vector, bint publishes) noexcept nogil:
        """Copy a block from the application's arrays to an engine vector (`publishes`), or back."""
        cdef long long began = now()
        cdef Py_ssize_t low = HEADER + block * self.own_block
        cdef Py_ssize_t high = self._end_of(block)
        cdef Py_ssize_t first, count, begin
        cdef char *ours
        cdef int i
        for i in range(self.layout.count):
            count = self.layout.part(i, low, high, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            ours = vector + self.layout.begin[i] + begin
            if publishes:
                self.layout.space.copy(ours, self.user[i] + begin, count)
            else:
                self.layout.space.copy(self.user[i] + begin, ours, count)
        self.reduction.busy_ns += now() - began

    cdef void adopt(self, char **kept) noexcept nogil:
        """Publish the rest of the application's arrays and return nothing to them.

        A ring has no room for that: the arrays `kept` take their place; if NULL, they stay in use.
        """
        if self.given and self.parts[self.rank].ringed:
            if kept != NULL and kept != self.user:
                self.layout.copy(kept, self.user)
                self.user = kept
            return
        while self.given and self.copied < self.own_blocks:
            self._take_block(self.memory.snapshot(self.rank))
        self._publish_copies()
        self.given = False
        self.user = NULL

    cdef bint uses(self) noexcept nogil:
        """Return whether a pending exchange still saves the snapshot in the result vector."""
        return self.parts[self.rank].saves and (
            self.entry != CLOSED or self.reached() == self.number)

    # Exchanges

    cdef bint needs_messages(self, long long number) noexcept nogil:
        """Return whether some members of this rank's group in a version do not share memory."""
        cdef int size = self.groups.of(self.rank, number + self.shift, self.members)
        return not self.joins(self.members, size)

    cdef bint help(self, int rank, long long number) noexcept nogil:
        """Average a block of a version for a rank's group; return whether there was one.

        If a member has yet to execute an earlier version, average a block of that one instead.
        """
        cdef int step, state, size
        cdef long long earlier
        for step in range(DEEPEST):
            size = self.groups.of(rank, number + self.shift, self.members)
            if not self.joins(self.members, size):
                return False
            state = self.claims.gather(number, self.members, size)
            if state == GATHERED:
                return self._average_block(number, size)
            if state != MISSING:
                return False
            rank = self.claims.missing
            earlier = self.claims.number(rank)
            # Versions before the last operation are complete, even if that rank's words lag.
            if self.claims.state(rank) == CLOSED or not self.oldest <= earlier < number:
                return False
            number = earlier
        return False

    cdef Py_ssize_t _block_for(self, int size) noexcept nogil:
        """Return the bytes of a block for this number of members."""
        return shared_block(self.length, size, self.layout.space.block)

    cdef void _divide(self, int size) noexcept nogil:
        """Divide the vector into blocks for this number of members."""
        self.block = self._block_for(size)
        self.blocks = (self.length + self.block - 1) // self.block

    cdef bint _average_block(self, long long number, int size) noexcept nogil:
        """Average a block of an exchange whose members have all arrived, if one is available."""
        cdef long long began = now()
        cdef long long ready, block
        cdef Averaging *averaging
        if self.count_averaging == AHEAD:
            return False
        self._divide(size)
        ready = self.claims.published(number, self.members, size, self.blocks)
        block = self.claims.claim(number, self.members[0], ready)
        if block < 0:
            return False
        averaging = &self.averaging[(self.first_averaging + self.count_averaging) % AHEAD]
        averaging.number, averaging.size = number, size
        averaging.block, averaging.blocks = block, self.blocks
        averaging.total = self._weigh(size)
        memcpy(averaging.members, self.members, size * sizeof(int))
        if averaging.total > 0:
            self._average(block, size)
        averaging.ticket = self.layout.space.begun()
        self.count_averaging += 1
        self.end_blocks()
        self.reduction.busy_ns += now() - began
        return True

    cdef void end_blocks(self) noexcept nogil:
        """Mark completed blocks as averaged, and finish each exchange whose last block this is."""
        cdef Averaging *averaging
        while self.count_averaging > 0:
            averaging = &self.averaging[self.first_averaging]
            if not self.layout.space.over(averaging.ticket):
                return
            self.first_averaging = (self.first_averaging + 1) % AHEAD
            self.count_averaging -= 1
            if self.claims.end(
                    averaging.number, averaging.members[0], averaging.block, averaging.blocks,
                    AVERAGED if averaging.total > 0 else EMPTY):
                self._finish(averaging.members, averaging.size, averaging.total)
                self.claims.release(averaging.number, averaging.members, averaging.size)

    cdef double _weigh(self, int size) noexcept nogil:
        """Compute each member's share of the mean; return the total weight."""
        cdef double total = 0
        cdef int i
        for i in range(size):
            self.shares[i] = self.parts[self.members[i]].weight
            total += self.shares[i]
        for i in range(size):
            if total > 0:
                self.shares[i] /= total
        return total

    cdef void _average(self, Py_ssize_t block, int size) noexcept nogil:
        """Average a block and write the mean to the target of each member that takes it."""
        cdef Py_ssize_t low = HEADER + block * self.block
        cdef Py_ssize_t high = min(low + self.block, self.layout.size)
        cdef Py_ssize_t itemsize, first, count, n, begin
        cdef int i, k, taker = 0
        cdef char *mean
        while taker < size and not self.parts[self.members[taker]].takes:
            taker += 1
        if taker == size:
            return
        for i in range(self.layout.count):
            count = self.layout.part(i, low, high, &first)
            itemsize = self.layout.itemsize[i]
            begin = self.layout.begin[i] + first * itemsize
            while count > 0:
                n = count if self.layout.space.deferred else min(count, CHUNK)
                for k in range(size):
                    self.vectors[k] = self._source(self.members[k], block, self.block) + begin
                    if self.parts[self.members[k]].saves:
                        self.layout.space.copy(
                            self.memory.result(self.members[k]) + begin, self.vectors[k],
                            n * itemsize)
                mean = self._target(self.members[taker], block, self.block) + begin
                self.layout.space.mean(i, mean, self.vectors, self.shares, size, n)
                for k in range(taker + 1, size):
                    if self.parts[self.members[k]].takes:
                        self.layout.space.copy(
                            self._target(self.members[k], block, self.block) + begin, mean,
                            n * itemsize)
                begin += n * itemsize
                count -= n

    cdef void _finish(self, const int *members, int size, double total) noexcept nogil:
        """Update every member's part: all blocks of the exchange are averaged."""
        cdef Part *part
        cdef int i
        for i in range(size):
            part = self.parts[members[i]]
            part.total = total
            if part.in_place and total > 0:
                part.weight = part.weight_after
                part.replaced = True
                part.saves = False
