"""An allreduce by reduce-scatter and allgather, for long vectors.

The messages of one block are sent while another is averaged. At most `DEPTH` blocks are in flight,
so that they stay in cache and a stopped member is not sent more than that. If possible, messages
are sent from and received in the application's buffer while it is in its call, but not before all
members have arrived. Passes over memory may be deferred, as on a device: no message is sent before
the pass that writes it is complete.
"""

from libc.stdlib cimport free
from libc.string cimport memset
from mpi4py.libmpi cimport (
    MPI_BYTE,
    MPI_REQUEST_NULL,
    MPI_Irecv,
    MPI_Isend,
)
from mpi4py.MPI cimport Comm

from collectives.memory.allocation cimport LINE, Memory, allocate, round_up, zeroed
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.exchange.clock cimport now
from collectives.exchange.reduction cimport Reduction
from collectives.exchange.return_codes cimport check
from collectives.memory.layout cimport HEADER
from collectives.protocols.slicing cimport BLOCKS, LONGEST, LONGEST_BLOCK, Slicing


cdef class Slices:
    """The reduction's allreduce. Slice j of each block is averaged by member j.

    Args:
        used: whether to allocate memory for it.
    """

    def __init__(self, Comm comm, Reduction reduction, bint used):
        cdef int most = comm.Get_size()
        cdef Py_ssize_t length = reduction.wire.size - HEADER
        cdef Py_ssize_t longest = min(most * LONGEST, max(LONGEST_BLOCK, length // BLOCKS))
        cdef int k
        cdef char *memory
        self.comm = comm.ob_mpi
        self.reduction = reduction
        self.wire = reduction.wire
        self.slicing = Slicing()
        self.room = round_up(
            min(length, max(longest, self.wire.space.block)), LINE) + most * LINE
        self.memory = self.wire.space.allocate(DEPTH * 3 * self.room if most > 1 and used else LINE)
        memory = self.memory.address
        if self.wire.space.deferred:
            self.spare = Memory()
            self.spare.address = <char *>allocate(self.room)
        self.requests = <MPI_Request *>zeroed((2 + 2 * DEPTH) * most, sizeof(MPI_Request))
        self.weights = <double *>zeroed(3 * most, sizeof(double))
        self.vectors = <const char **>zeroed(most, sizeof(char *))
        if self.requests == NULL or self.weights == NULL or self.vectors == NULL:
            raise MemoryError
        self.shares = self.weights + 2 * most
        for k in range(DEPTH):
            self.blocks[k].requests = self.requests + (2 + 2 * k) * most
            self.blocks[k].parts = memory + 3 * k * self.room
            self.blocks[k].mean_space = self.blocks[k].parts + self.room
            self.blocks[k].outgoing_space = self.blocks[k].mean_space + self.room

    def __dealloc__(self):
        free(self.requests)
        free(self.weights)
        free(self.vectors)

    cdef void begin(self) noexcept nogil:
        cdef int others = self.reduction.size - 1
        cdef int other, member
        self.slicing.lay_out(
            self.reduction.end - HEADER, self.reduction.size, self.wire.space.block)
        self.left = self.slicing.blocks
        self.weighed = False
        self.finished = 0
        self._look_for_errors()
        self.weights[2 * self.reduction.me] = self.reduction.own_weight
        self.weights[2 * self.reduction.me + 1] = self.reduction.own_count
        pthread_mutex_lock(&mpi_mutex)
        for other in range(others):
            member = (self.reduction.me + 1 + other) % self.reduction.size
            self._receive(<char *>&self.weights[2 * member], 2 * sizeof(double), member, 0,
                          &self.requests[other])
            self._send(<char *>&self.weights[2 * self.reduction.me], 2 * sizeof(double), member, 0,
                       &self.requests[others + other])
        pthread_mutex_unlock(&mpi_mutex)

    cdef bint progress(self) noexcept nogil:
        """Progress without blocking; return whether the mean is complete."""
        cdef bint progressed = True
        cdef int k
        cdef long long began
        if not self.weighed and self.reduction.have_arrived(
                self.requests, 2 * (self.reduction.size - 1)):
            self._weigh()
            self.reduction.progress_count += 1
            began = now()
            for k in range(DEPTH):
                # Place k has the same blocks at all members, in whatever order these end: their
                # messages are matched by k.
                self.blocks[k].number = k
                self._begin_block(k)
            self.reduction.worked(began)
        while self.weighed and progressed and self.left > 0 and self.reduction.error == 0:
            progressed = False
            for k in range(DEPTH):
                progressed |= self._step(k)
        return (self.left == 0 and self.reduction.error == 0
                and self.reduction.space.over(self.finished))

    cdef void divert(self) noexcept nogil:
        """Receive means whose receives are not posted yet into the engine's own memory."""
        cdef int k
        for k in range(DEPTH):
            if self.weighed and self.blocks[k].stage < AVERAGING:
                self.blocks[k].mean = self.blocks[k].mean_space

    cdef bint uses(self) noexcept nogil:
        """Return whether a pending message reads or writes the application's buffer."""
        cdef int k
        for k in range(DEPTH):
            if self.weighed and self.blocks[k].number < self.slicing.blocks and self.blocks[k].lent:
                return True
        return False

    cdef bint _step(self, int k) noexcept nogil:
        """Advance a block by one stage; return whether that was possible."""
        cdef Block *block = &self.blocks[k]
        cdef long long began
        if block.number >= self.slicing.blocks or not self._may_go_on(block):
            return False
        began = now()
        if block.stage == COMING:
            self._take(block, k)
        elif block.stage == SOURCE:
            self._exchange_parts(block, k)
        elif block.stage == PARTS:
            self._average(block)
            if self._may_go_on(block):
                self._exchange_means(block, k)
        elif block.stage == AVERAGING:
            self._exchange_means(block, k)
        else:
            self.reduction.finish(HEADER + self.slicing.bound(block.number, 0),
                                  HEADER + self.slicing.end(block.number), block.mean)
            self.reduction.give_back_user(HEADER + self.slicing.end(block.number))
            self.finished = self.reduction.space.begun()
            self.left -= 1
            block.number += DEPTH
            self._begin_block(k)
        self.reduction.progress_count += 1
        self.reduction.worked(began)
        return True

    cdef bint _may_go_on(self, Block *block) noexcept nogil:
        """Return whether what a block waits for is complete."""
        cdef int messages = 2 * (self.reduction.size - 1)
        if block.stage == COMING:
            return (self.reduction.has_user(HEADER + self.slicing.end(block.number))
                    and self._is_next(block))
        if block.stage == SOURCE:
            return self.reduction.space.over(block.ticket)
        if block.stage == AVERAGING:
            return self.wire.space.over(block.ticket)
        return ((block.stage == PARTS or self._is_first(block))
                and self.reduction.have_arrived(block.requests, messages))

    cdef bint _is_first(self, Block *block) noexcept nogil:
        """Return whether no earlier block is pending: blocks end, and so begin, in order."""
        cdef int other
        for other in range(DEPTH):
            if self.blocks[other].number < block.number:
                return False
        return True

    cdef bint _is_next(self, Block *block) noexcept nogil:
        """Return whether all earlier blocks have been taken from the application's vector."""
        cdef int other
        for other in range(DEPTH):
            if self.blocks[other].number < block.number and self.blocks[other].stage == COMING:
                return False
        return True

    cdef void _look_for_errors(self) noexcept nogil:
        """Give MPI host memory once the device has failed: its driver no longer serves MPI.

        The messages are still exchanged, since the other members wait for them; these learn of the
        failure by the control tree.
        """
        if self.spare is None or self.failed:
            return
        self.failed = self.wire.space.error() != 0
        if self.failed:
            memset(self.spare.address, 0, self.room)

    cdef void _weigh(self) noexcept nogil:
        """Compute each member's share of the mean; all weights and counts have arrived."""
        cdef int member
        self.reduction.weight = self.reduction.count = 0
        for member in range(self.reduction.size):
            self.reduction.weight += self.weights[2 * member]
            self.reduction.count += self.weights[2 * member + 1]
        for member in range(self.reduction.size):
            if self.reduction.weight > 0:
                self.shares[member] = self.weights[2 * member] / self.reduction.weight
        self.reduction.count /= self.reduction.size
        self.weighed = True

    cdef void _begin_block(self, int k) noexcept nogil:
        """Begin this place's next block, if one is left and its data has arrived."""
        cdef Block *block = &self.blocks[k]
        block.stage = COMING
        block.lent = False
        if block.number < self.slicing.blocks and self._may_go_on(block):
            self._take(block, k)

    cdef void _take(self, Block *block, int k) noexcept nogil:
        """Take a block from the application's vector or the source; send it once it is written."""
        cdef Py_ssize_t low, end
        low = HEADER + self.slicing.bound(block.number, 0)
        end = HEADER + self.slicing.end(block.number)
        block.outgoing = self.reduction.outgoing(block.outgoing_space, low, end)
        block.mean = self.reduction.incoming(low, end)
        if block.mean == NULL:
            block.mean = block.mean_space
        block.lent = block.mean != block.mean_space and self.reduction.target == self.reduction.user
        if (self.reduction.lent and not self.reduction.keeps
                and block.outgoing != block.outgoing_space):
            block.lent = True
        block.stage = SOURCE
        block.ticket = self.reduction.space.begun()
        if self._may_go_on(block):
            self._exchange_parts(block, k)

    cdef void _exchange_parts(self, Block *block, int k) noexcept nogil:
        """Send every other member its slice of a block, and receive this member's of theirs."""
        cdef int others = self.reduction.size - 1
        cdef Py_ssize_t low = self.slicing.bound(block.number, 0)
        cdef Py_ssize_t begin, count
        cdef Py_ssize_t mine = self._slice_of(block.number, self.reduction.me, &begin)
        cdef int other, member
        block.stage = PARTS
        self._look_for_errors()
        pthread_mutex_lock(&mpi_mutex)
        for other in range(others):
            member = (self.reduction.me + 1 + other) % self.reduction.size
            count = self._slice_of(block.number, member, &begin)
            self._receive(block.parts + other * mine, mine, member, 1 + k,
                          &block.requests[other])
            self._send(block.outgoing + (begin - low), count, member, 1 + k,
                       &block.requests[others + other])
        pthread_mutex_unlock(&mpi_mutex)

    cdef void _average(self, Block *block) noexcept nogil:
        """Average this member's slice of a block."""
        cdef int others = self.reduction.size - 1
        cdef Py_ssize_t low = self.slicing.bound(block.number, 0)
        cdef Py_ssize_t begin, first, count, offset
        cdef Py_ssize_t mine = self._slice_of(block.number, self.reduction.me, &begin)
        cdef char *own = block.outgoing + (begin - low)
        cdef char *mean
        cdef int i, other
        for i in range(self.wire.count):
            count = self.wire.part(i, HEADER + begin, HEADER + begin + mine, &first)
            if count == 0:
                continue
            offset = self.wire.begin[i] + first * self.wire.itemsize[i] - HEADER - begin
            self.vectors[self.reduction.me] = own + offset
            for other in range(others):
                self.vectors[(self.reduction.me + 1 + other) % self.reduction.size] = (
                    block.parts + other * mine + offset)
            mean = block.mean + (begin - low) + offset
            self.wire.space.mean(
                i, &mean, 1, self.vectors, self.shares, self.reduction.size, count)
        block.stage = AVERAGING
        block.ticket = self.wire.space.begun()

    cdef void _exchange_means(self, Block *block, int k) noexcept nogil:
        """Send the mean of this member's slice to the others, and receive theirs."""
        cdef int others = self.reduction.size - 1
        cdef Py_ssize_t low = self.slicing.bound(block.number, 0)
        cdef Py_ssize_t begin, mine_begin, count
        cdef Py_ssize_t mine = self._slice_of(block.number, self.reduction.me, &mine_begin)
        cdef int other, member
        block.stage = MEANS
        self._look_for_errors()
        pthread_mutex_lock(&mpi_mutex)
        for other in range(others):
            member = (self.reduction.me + 1 + other) % self.reduction.size
            count = self._slice_of(block.number, member, &begin)
            self._receive(block.mean + (begin - low), count, member, 1 + DEPTH + k,
                          &block.requests[other])
            self._send(block.mean + (mine_begin - low), mine, member, 1 + DEPTH + k,
                       &block.requests[others + other])
        pthread_mutex_unlock(&mpi_mutex)

    cdef Py_ssize_t _slice_of(
        self, Py_ssize_t number, int member, Py_ssize_t *begin
    ) noexcept nogil:
        """Return the length of a member's slice of a block; set `begin` to where it begins."""
        begin[0] = self.slicing.bound(number, member)
        return self.slicing.bound(number, member + 1) - begin[0]

    cdef void _receive(
        self, char *to, Py_ssize_t count, int member, int tag, MPI_Request *request
    ) noexcept nogil:
        """Post a receive from a member, unless it is empty; the MPI mutex is held."""
        request[0] = MPI_REQUEST_NULL
        if self.failed and tag > 0:
            to = self.spare.address
        if count > 0:
            check(&self.reduction.error, MPI_Irecv(
                to, <int>count, MPI_BYTE, self.reduction.members[member], self.reduction.tag + tag,
                self.comm, request))

    cdef void _send(
        self, const char *source, Py_ssize_t count, int member, int tag, MPI_Request *request
    ) noexcept nogil:
        """Post a send to a member, unless it is empty; the MPI mutex is held."""
        request[0] = MPI_REQUEST_NULL
        if self.failed and tag > 0:
            source = self.spare.address
        if count > 0:
            check(&self.reduction.error, MPI_Isend(
                source, <int>count, MPI_BYTE, self.reduction.members[member],
                self.reduction.tag + tag, self.comm, request))
            self.reduction.bytes_sent += count
