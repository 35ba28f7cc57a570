"""An allreduce among ranks of one node, in shared memory, by blocks.

Which rank averages which block is decided in `protocols.shared_exchange`; here are the addresses,
copies and means. A member that is present until the end may pass its blocks through a short ring,
which stays in cache, instead of a vector.
"""

from libc.stdlib cimport free
from libc.string cimport memcpy
from mpi4py.libmpi cimport MPI_ERR_OTHER

from collectives.exchange.clock cimport now
from collectives.exchange.reduction cimport Reduction
from collectives.exchange.shared.memory cimport ELSEWHERE, Part, SharedMemory
from collectives.exchange.shared.slots cimport Slots, has_slots
from collectives.memory.allocation cimport LINE, allocate, try_to_allocate, zeroed
from collectives.memory.layout cimport HEADER
from collectives.memory.other_processes cimport copy_from, copy_to
from collectives.protocols.claims cimport BLOCKS, ClaimsProtocol
from collectives.protocols.groups cimport Groups
from collectives.protocols.shared_exchange cimport (
    AHEAD,
    FIRST_BLOCK,
    NOWHERE,
    RING,
    SNAPSHOT,
    WINDOW,
    SharedExchangeProtocol,
    source_of,
    target_of,
)
from collectives.protocols.slicing cimport most_shared_blocks, shared_block

cdef enum:
    # Elements per pass, so that the next pass finds them in the first-level cache.
    CHUNK = 1024
    # Bytes of the buffers for parts of other processes' arrays: all of them, which stay in the
    # second-level cache, and the shortest and longest of one.
    STAGE = 524288
    LEAST = 32768
    MOST = 131072
    # How often a caller with a core of its own looks for the other members before it copies blocks
    # that it could average in place: for some microseconds, as a copy takes.
    PATIENCE = 100


cdef class SharedBlocks(SharedExchangePort):
    """The blocks of exchanges in memory that this rank shares.

    Args:
        memory: that of this rank.
        groups: the members of each exchange; None if members know only their own groups.
    """

    def __init__(self, Reduction reduction, SharedMemory memory, Groups groups, int rank, int size):
        self.reduction = reduction
        self.layout = reduction.layout
        self.length = self.layout.size - HEADER
        self.memory = memory
        self.parts = memory.parts
        self.groups = groups
        self.rank = rank
        self.shares = <double *>zeroed(size, sizeof(double))
        self.size = size
        self.vectors = <char **>zeroed(6 * size, sizeof(char *))
        self.shown = <char **>zeroed(self.layout.count, sizeof(char *))
        if self.shares == NULL or self.vectors == NULL or self.shown == NULL:
            raise MemoryError
        self.sources = self.vectors + size
        self.targets = self.vectors + 2 * size
        self.means = self.vectors + 4 * size

    def __dealloc__(self):
        free(self.stage)
        free(self.shown)
        free(self.saved)
        free(self.shares)
        free(self.vectors)

    cdef bint joins(self, const int *members, int size) noexcept nogil:
        """Return whether these ranks can exchange their vectors in shared memory."""
        cdef int i
        for i in range(size):
            if self.parts[members[i]] == NULL:
                return False
        return True

    cdef int find_group(self, int rank, long long number, int *members) noexcept nogil:
        cdef int size = self.groups.of(rank, number + self.shift, members)
        return size if self.joins(members, size) else 0

    # Blocks

    cdef void begin(
        self, long long number, bint together, char **user, int size
    ) noexcept nogil:
        """Set the application's arrays, and the number of members, of this rank's exchange."""
        free(self.saved)
        self.saved = NULL
        self.user = user
        self.own_averaged = self._averaged_in(number, together)
        self.own_filled = self.parts[self.rank].filled
        self._divide(size)
        self.own_block = self.block
        self.own_blocks = self.count

    cdef void _divide(self, int size) noexcept nogil:
        """Divide the vector into blocks for this number of members."""
        if size != self.divided:
            self.divided = size
            self.block = shared_block(self.length, size, self.layout.space.block)
            self.count = (self.length + self.block - 1) // self.block

    cdef int _averaged_in(self, long long number, bint together) noexcept nogil:
        """Return how many arrays, from the first on, an exchange averages."""
        if self.groups is None or together:
            return self.layout.count
        return self.groups.averaged(number + self.shift)

    cdef Py_ssize_t blocks(self, int size) noexcept nogil:
        self._divide(size)
        return self.count

    cdef char *_at(
        self, int rank, int place, int i, Py_ssize_t block, Py_ssize_t bytes
    ) noexcept nogil:
        """Return where a rank's vector begins that has this block; of a ring, it would begin there.

        As a vector's arrays are apart in a window, its address depends on the array, `i`.
        """
        if place == NOWHERE:
            return NULL
        if place == WINDOW:
            return self.memory.array(rank, i) - self.layout.begin[i]
        if place == RING:
            return self.memory.ring(rank) + block % AHEAD * bytes - (HEADER + block * bytes)
        return self.memory.snapshot(rank) if place == SNAPSHOT else self.memory.result(rank)

    cdef char *_source(self, int rank, int i, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil:
        cdef Part *part = self.parts[rank]
        if self.in_place and rank == self.rank:
            return self.user[i] - self.layout.begin[i]
        return self._at(rank, source_of(part.ringed, part.shows), i, block, bytes)

    cdef char *_target(self, int rank, int i, Py_ssize_t block, Py_ssize_t bytes) noexcept nogil:
        cdef Part *part = self.parts[rank]
        if self.in_place and rank == self.rank:
            return self.user[i] - self.layout.begin[i]
        return self._at(
            rank, target_of(part.ringed, part.in_place, part.takes), i, block, bytes)

    cdef char *_second_target(self, int rank, int i) noexcept nogil:
        """Return where the mean goes besides; to a vector that is not averaged only what it gave.
        """
        cdef Part *part = self.parts[rank]
        if not part.gets or i >= self.averaged and not part.filled:
            return NULL
        return self._at(rank, WINDOW, i, 0, 0)

    cdef void set_path(self, bint ringed, bint takes, bint shows, bint gets) noexcept nogil:
        cdef Part *part = self.parts[self.rank]
        part.ringed = ringed
        part.takes = takes or part.in_place
        part.shows = shows
        part.gets = gets

    cdef long long begun(self) noexcept nogil:
        return self.layout.space.begun()

    cdef bint over(self, long long ticket) noexcept nogil:
        return self.layout.space.over(ticket)

    # The application's blocks

    cdef bint has_block(self, Py_ssize_t block) noexcept nogil:
        return self.reduction.arrival.has(self.user, self._end_of(block))

    cdef long long contribute_block(self, Py_ssize_t block) noexcept nogil:
        self._copy_block(block, self._source(self.rank, 0, block, self.own_block), True)
        return self.layout.space.begun()

    cdef void return_block(self, Py_ssize_t block, bint in_place) noexcept nogil:
        if not in_place:
            self._copy_block(block, self._target(self.rank, 0, block, self.own_block), False)
        self.reduction.arrival.give_back(self.user, self._end_of(block))

    cdef void keep_arrays(self) noexcept nogil:
        if self.kept != NULL and self.kept != self.user:
            self.layout.copy(self.kept, self.user)
            self.user = self.kept

    cdef void withdraw(self, Py_ssize_t averaged) noexcept nogil:
        cdef Part *part = self.parts[self.rank]
        cdef Py_ssize_t block
        cdef int i
        if self.saved == NULL:
            for i in range(self.layout.count):
                self.shown[i] = self.memory.array(self.rank, i)
        self.user = self.shown
        if self.kept != NULL:  # it is the snapshot
            self.layout.copy(self.kept, self.user)
            part.in_place = True
        elif part.shows:
            for block in range(averaged, self.own_blocks):
                self._copy_block(block, self.memory.snapshot(self.rank), True)
        elif not part.in_place:
            for block in range(averaged):
                self._copy_block(block, self.memory.result(self.rank), True)
        self.set_path(False, True, False, False)

    cdef void save_arrays(self) noexcept nogil:
        """Keep what the application gets back, of arrays that are not in windows."""
        cdef int i
        free(self.saved)
        self.saved = try_to_allocate(self.layout.size)
        for i in range(self.layout.count):
            self.shown[i] = self.memory.array(self.rank, i)
            if self.saved != NULL and self.memory.places[self.rank][i].family == ELSEWHERE:
                memcpy(self.saved + self.layout.begin[i], self.shown[i], self.layout.bytes[i])
                self.shown[i] = self.saved + self.layout.begin[i]

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
            if i >= self.own_averaged and not (self.own_filled or publishes):
                break  # what it contributed is 0, in place of what it keeps
            count = self.layout.part(i, low, high, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            ours = vector + self.layout.begin[i] + begin
            if publishes:
                self.layout.space.copy(ours, self.user[i] + begin, count)
            else:
                self.layout.space.copy(self.user[i] + begin, ours, count)
        self.reduction.worked(began)

    # Averages

    cdef double weigh(self, const int *members, int size) noexcept nogil:
        """Compute each member's share of the mean; return the total weight."""
        cdef double total = 0
        cdef int i
        for i in range(size):
            self.shares[i] = self.parts[members[i]].weight
            total += self.shares[i]
        for i in range(size):
            if total > 0:
                self.shares[i] /= total
        return total

    cdef long long average(
        self, long long number, bint together, Py_ssize_t block, const int *members, int size,
        bint in_place
    ) noexcept nogil:
        cdef long long began = now()
        cdef Py_ssize_t low
        self._divide(size)
        self.averaged = self._averaged_in(number, together)
        low = HEADER + block * self.block
        self.in_place = in_place
        self._average(block, low, min(low + self.block, self.layout.size), members, size)
        self.in_place = False
        self.reduction.worked(began)
        return self.layout.space.begun()

    cdef void _average(
        self, Py_ssize_t block, Py_ssize_t low, Py_ssize_t high, const int *members, int size
    ) noexcept nogil:
        """Write the mean of these bytes, a block, to each target."""
        cdef Py_ssize_t itemsize, first, count, n, begin
        cdef int i, k
        cdef bint saves = False
        for k in range(size):
            saves = saves or self.parts[members[k]].saves
        for i in range(self.layout.count):
            count = self.layout.part(i, low, high, &first)
            if count == 0:
                continue
            itemsize = self.layout.itemsize[i]
            begin = self.layout.begin[i] + first * itemsize
            self.elsewhere = False
            for k in range(size):
                self.sources[k] = self._source(members[k], i, block, self.block)
                self.targets[2 * k] = self._target(members[k], i, block, self.block)
                self.targets[2 * k + 1] = self._second_target(members[k], i)
                self.elsewhere = (
                    self.elsewhere or self._shows_elsewhere(members[k], i)
                    or self.targets[2 * k + 1] != NULL
                    and self.memory.is_elsewhere(members[k], i))
            if i >= self.averaged:
                self._keep(i, begin, count * itemsize, members, size)
                continue
            while count > 0:
                n = count
                if saves and not self.layout.space.deferred:
                    n = min(n, CHUNK)
                if self.elsewhere:
                    n = min(n, self.piece // itemsize)
                self._average_part(i, begin, n, members, size)
                begin += n * itemsize
                count -= n

    cdef void _average_part(
        self, int i, Py_ssize_t begin, Py_ssize_t n, const int *members, int size
    ) noexcept nogil:
        """Write the mean of so many elements of an array, from this byte of a vector on."""
        cdef Py_ssize_t bytes = n * self.layout.itemsize[i]
        cdef int k, own = 0, takers = 0
        for k in range(size):
            if members[k] == self.rank:
                own = takers
            self.vectors[k] = self.sources[k] + begin
            if self.elsewhere and self.shares[k] != 0 and self._shows_elsewhere(members[k], i):
                self._copy_from(members[k], self.stage + k * self.piece, self.vectors[k], bytes)
                self.vectors[k] = self.stage + k * self.piece
            if self.parts[members[k]].saves:
                self.layout.space.copy(
                    self.memory.result(members[k]) + begin, self.vectors[k], bytes)
            if self.targets[2 * k] != NULL:
                self.means[takers] = self.targets[2 * k] + begin
                takers += 1
            if (self.targets[2 * k + 1] != NULL
                    and not (self.elsewhere and self.memory.is_elsewhere(members[k], i))):
                self.means[takers] = self.targets[2 * k + 1] + begin
                takers += 1
        if takers == 0:
            if not self.elsewhere:
                return
            self.means[0] = self.stage + size * self.piece
            takers = 1
        if own < takers:  # a long mean is copied from the first
            self.means[0], self.means[own] = self.means[own], self.means[0]
        self.layout.space.mean(
            i, self.means, takers, <const char **>self.vectors, self.shares, size, n)
        if not self.elsewhere:
            return
        for k in range(size):
            if self.targets[2 * k + 1] != NULL and self.memory.is_elsewhere(members[k], i):
                self._copy_to(members[k], self.targets[2 * k + 1] + begin, self.means[0], bytes)

    cdef void _keep(
        self, int i, Py_ssize_t begin, Py_ssize_t bytes, const int *members, int size
    ) noexcept nogil:
        """Let each member have its own of these bytes, of an array that is not averaged."""
        cdef char *own
        cdef char *to
        cdef int k
        for k in range(size):
            own = self.sources[k] + begin
            if self.parts[members[k]].saves:
                self.layout.space.copy(self.memory.result(members[k]) + begin, own, bytes)
            to = self.targets[2 * k]
            if self._shows_elsewhere(members[k], i):
                if to != NULL:
                    self._copy_from(members[k], to + begin, own, bytes)
                continue
            if to != NULL and to != self.sources[k]:
                self.layout.space.copy(to + begin, own, bytes)
            to = self.targets[2 * k + 1]
            if to == NULL or to == self.sources[k]:
                continue
            if self.memory.is_elsewhere(members[k], i):
                self._copy_to(members[k], to + begin, own, bytes)
            else:
                self.layout.space.copy(to + begin, own, bytes)

    # Arrays in the memory of other processes

    cdef int copy_directly(self) except -1:
        """From now on, copy from and to other processes' arrays that are not in windows."""
        if self.memory.begin_of_ring == 0 or self.layout.space.deferred:
            return 0
        self.piece = LINE * (min(max(STAGE // (self.size + 1), LEAST), MOST) // LINE)
        self.stage = allocate((self.size + 1) * self.piece)
        self.memory.copies = True
        return 0

    cdef bint _shows_elsewhere(self, int rank, int i) noexcept nogil:
        """Return whether a rank contributes an array that is in its process only."""
        return self.parts[rank].shows and self.memory.is_elsewhere(rank, i)

    cdef void _copy_from(
        self, int rank, char *to, const char *source, Py_ssize_t bytes
    ) noexcept nogil:
        if not copy_from(self.memory.processes[rank], to, source, bytes):
            self.reduction.error = MPI_ERR_OTHER

    cdef void _copy_to(
        self, int rank, char *to, const char *source, Py_ssize_t bytes
    ) noexcept nogil:
        if not copy_to(self.memory.processes[rank], to, source, bytes):
            self.reduction.error = MPI_ERR_OTHER

    # The end of an exchange

    cdef double total_weight(self) noexcept nogil:
        return self.parts[self.rank].total

    cdef bint end_part(self, int rank, double total) noexcept nogil:
        self.parts[rank].total = total
        return self.parts[rank].in_place

    cdef void average_counts(
        self, long long number, const int *members, int size
    ) noexcept nogil:
        cdef bint of_all = self.groups is not None and self.groups.is_of_all(number + self.shift)
        cdef double mean = 0
        cdef int i
        for i in range(size):
            mean += self.parts[members[i]].count
        mean /= size
        for i in range(size):
            self.parts[members[i]].count = mean
            if of_all:
                self.parts[members[i]].average_count = mean
                self.parts[members[i]].average_number = number

    cdef void replace(self, int rank) noexcept nogil:
        cdef Part *part = self.parts[rank]
        part.weight = part.weight_after
        part.replaced = True
        part.saves = False

    cdef void progressed(self) noexcept nogil:
        self.reduction.progress_count += 1


cdef class Shared(Transport):
    """This rank's part in its own exchanges on the node, and its help with those of other ranks.

    Args:
        groups: the members of each exchange, used for the groups of other ranks, too; None if
            members know only their own groups, and all are present in each exchange.
        rank, size: this rank, and number of ranks.
        vectors: whether to have a snapshot and a result vector.
        rings: whether every member of an exchange comes to it, and may use a ring; or slots,
            if there are vectors, and short ones.
        spins: whether callers that wait have a core each.
    """

    def __init__(
        self, Reduction reduction, Groups groups, int rank, int size, bint vectors, bint rings,
        bint spins
    ):
        cdef Layout layout = reduction.layout
        cdef Py_ssize_t length = layout.size - HEADER
        # Sufficient for groups of any size: blocks are longest in the smallest.
        # On a device a pass may end after an interrupted call has given the arrays back.
        cdef int patience = 0 if layout.space.deferred else PATIENCE if spins else 1
        cdef bint by_slots = (
            vectors and rings and not layout.space.deferred and has_slots(layout.size))
        cdef Py_ssize_t ring = min(AHEAD * shared_block(length, 2, layout.space.block), length)
        self.memory = SharedMemory(
            layout, rank, size, BLOCKS + most_shared_blocks(length, size), vectors,
            ring if rings else 0, by_slots)
        if by_slots:
            self.slots = Slots(reduction, self.memory, rank, size)
        reduction.exported = vectors and layout.space.deferred
        self.blocks = SharedBlocks(reduction, self.memory, groups, rank, size)
        self.part = self.memory.parts[rank]
        claims = ClaimsProtocol(None)
        (<ClaimsProtocol>claims).words = self.memory.words
        self.steps = SharedExchangeProtocol(claims, rank, AHEAD, None, patience)
        self.members = <int *>zeroed((FIRST_BLOCK + AHEAD) * size, sizeof(int))
        if self.members == NULL:
            raise MemoryError
        self.steps.members, self.steps.most = self.members, size
        self.steps.attach(self.blocks)

    def __dealloc__(self):
        free(self.members)

    cdef void describe(
        self, bint in_place, bint saves, bint filled, double weight, double weight_after,
        double count
    ) noexcept nogil:
        """Set what an exchange does with this rank's vectors; the part must be closed."""
        self.blocks.set_path(False, True, False, False)
        self.part.in_place = in_place
        self.part.saves = saves
        self.part.filled = filled
        self.part.replaced = False
        self.part.weight = weight
        self.part.weight_after = weight_after
        self.part.count = count
        self.part.average_number = -1

    cdef bint by_slots(self, int size) noexcept nogil:
        """Return whether an exchange of so many members is by slots."""
        return self.slots is not None and self.slots.suit(size)

    cdef void begin(
        self, long long number, bint together, const int *members, int size, char **user,
        bint lent, bint ringed, bint keeps
    ) noexcept nogil:
        """Begin this rank's part in an exchange; in one that is `together` every member does so.

        If `lent`, the application's arrays, `user`, are published block by block; unless NULL,
        they receive the mean. `ringed`, by way of the ring alone, is possible if they do both, or
        if this rank has weight 0 and receives nothing. Arrays in a window are used there instead,
        except that a rank which `keeps` what it contributes in its snapshot publishes that. Short
        vectors go by the `slots`, which then are the transport of this exchange.
        """
        cdef bint windowed = False
        if self.by_slots(size):
            self.slots.begin(
                number, members, size, user, lent, ringed,
                self.blocks._averaged_in(number, together))
            return
        # What arrives from a device is not there as a whole yet.
        windowed = (user != NULL and self.memory.begin_of_ring > 0
                    and self.blocks.reduction.arrival.arrays == NULL and self.memory.show(user))
        self.blocks.reduction.in_place += windowed
        self.blocks.begin(number, together, user, size)
        self.steps.begin(
            number, together, members, size, lent, user != NULL, ringed, windowed, keeps)

    cdef bint progress(self) noexcept nogil:
        if not self.steps.progress():
            return False
        self.blocks.reduction.weight = self.part.total
        self.blocks.reduction.count = self.part.count
        return True

    cdef void adopt(self, char **kept) noexcept nogil:
        """Publish the rest of the application's arrays and return nothing to them.

        A ring has no room for that: the arrays `kept` take their place; if NULL, they stay in use.
        """
        self.blocks.kept = kept
        self.steps.adopt()

    cdef void leave(self) noexcept nogil:
        if self.steps.withdrawing:
            self.memory.leave()
            self.blocks.save_arrays()

    cdef bint uses(self, char **user) noexcept nogil:
        """Return whether a pending exchange still uses the arrays in a window, or the result."""
        return self.steps.withdrawing or self.part.saves and self.steps.is_pending()
