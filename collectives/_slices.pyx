# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""An allreduce by reduce-scatter and allgather, for long vectors.

The messages of one block travel while another is averaged, and no more than `DEPTH` blocks are
under way, so that they stay in cache and a stopped member is not sent more than that. No message
is to or from the application's memory.
"""

from libc.stdlib cimport calloc, free
from mpi4py.libmpi cimport (
    MPI_BYTE,
    MPI_DOUBLE,
    MPI_REQUEST_NULL,
    MPI_STATUSES_IGNORE,
    MPI_SUCCESS,
    MPI_Comm,
    MPI_Irecv,
    MPI_Isend,
    MPI_Testall,
)
from mpi4py.MPI cimport Comm

from collectives._memory cimport LINE, allocate, round_up
from collectives._mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives._rhythm cimport now
from collectives._task cimport Task
from collectives._vectors cimport HEADER, weight_of
from collectives.protocols.slicing cimport BLOCKS, LONGEST_BLOCK, Slicing


cdef class Slices:
    """The task's allreduce. Slice j of each block is averaged by member j."""

    def __init__(self, Comm comm, Task task):
        cdef int most = comm.Get_size()
        cdef Py_ssize_t length = task.wire.size - HEADER
        cdef int vectors = 3 if task.compressed else 2
        cdef int k
        cdef char *memory
        self.comm = comm.ob_mpi
        self.task = task
        self.wire = task.wire
        self.slicing = Slicing()
        self.room = round_up(
            min(length, max(LONGEST_BLOCK, length // BLOCKS)), LINE) + most * LINE
        self.memory = memory = allocate(DEPTH * vectors * self.room)
        self.requests = <MPI_Request *>calloc((2 + 4 * DEPTH) * most, sizeof(MPI_Request))
        self.weights = <double *>calloc(2 * most, sizeof(double))
        self.vectors = <const char **>calloc(most, sizeof(char *))
        if self.requests == NULL or self.weights == NULL or self.vectors == NULL:
            raise MemoryError
        self.shares = self.weights + most
        for k in range(DEPTH):
            self.blocks[k].requests = self.requests + (2 + 4 * k) * most
            self.blocks[k].parts = memory + vectors * k * self.room
            self.blocks[k].mean = self.blocks[k].parts + self.room
            self.blocks[k].outgoing = self.blocks[k].mean + self.room

    def __dealloc__(self):
        free(self.memory)
        free(self.requests)
        free(self.weights)
        free(self.vectors)

    cdef void begin(self) noexcept nogil:
        cdef int others = self.task.size - 1
        cdef int k, other, member
        self.slicing.begin(self.wire.size - HEADER, self.task.size)
        self.left = self.slicing.blocks
        self.weighed = False
        self.weights[self.task.me] = weight_of(self.task.source)[0]
        pthread_mutex_lock(&mpi_mutex)
        for other in range(others):
            member = (self.task.me + 1 + other) % self.task.size
            self._check(MPI_Irecv(&self.weights[member], 1, MPI_DOUBLE, self.task.members[member],
                                  self.task.tag, self.comm, &self.requests[other]))
            self._check(MPI_Isend(&self.weights[self.task.me], 1, MPI_DOUBLE, self.task.members[member],
                                  self.task.tag, self.comm, &self.requests[others + other]))
        pthread_mutex_unlock(&mpi_mutex)
        for k in range(DEPTH):
            # The same place for a block at every member, whichever ends first: its tag tells it.
            self.blocks[k].number = k
            self._begin_block(k)

    cdef bint progress(self) noexcept nogil:
        """Do what can be done without waiting; return whether the mean is there."""
        cdef bint moved = True
        cdef int k
        if not self.weighed and self._arrived(self.requests, 2 * (self.task.size - 1)):
            self._weigh()
        while self.weighed and moved and self.left > 0 and self.task.error == 0:
            moved = False
            for k in range(DEPTH):
                moved |= self._step(k)
        return self.left == 0 and self.task.error == 0

    cdef bint _step(self, int k) noexcept nogil:
        """Take a block one step on; return whether that was possible."""
        cdef Block *block = &self.blocks[k]
        cdef int others = self.task.size - 1
        cdef Py_ssize_t low
        cdef long long began
        if block.number >= self.slicing.blocks:
            return False
        if block.stage == PARTS:
            if not self._arrived(block.requests, others):
                return False
            began = now()
            self._average(k)
        else:
            if not self._arrived(block.requests + others, 3 * others):
                return False
            began = now()
            low = block.number * self.slicing.block
            self.task.write(HEADER + low, HEADER + self.slicing.end(block.number),
                            block.mean, 1, NULL, 0)
            self.left -= 1
            block.number += DEPTH
            self._begin_block(k)
        self.task.moves += 1
        self.task.busy_ns += now() - began
        return True

    cdef bint _arrived(self, MPI_Request *requests, int count) noexcept nogil:
        cdef int done
        pthread_mutex_lock(&mpi_mutex)
        self._check(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE))
        pthread_mutex_unlock(&mpi_mutex)
        return done and self.task.error == 0

    cdef void _weigh(self) noexcept nogil:
        """All weights are there: what share has each member?"""
        cdef int member
        self.task.weight = 0
        for member in range(self.task.size):
            self.task.weight += self.weights[member]
        for member in range(self.task.size):
            self.shares[member] = self.weights[member] / self.task.weight if self.task.weight > 0 else 0
        self.weighed = True

    cdef void _begin_block(self, int k) noexcept nogil:
        """Send every other member its slice of this place's next block, if there is one."""
        cdef Block *block = &self.blocks[k]
        cdef int others = self.task.size - 1
        cdef Py_ssize_t number = block.number
        cdef Py_ssize_t low, begin, end, mine
        cdef char *outgoing
        cdef int other, member
        if number >= self.slicing.blocks:
            return
        block.stage = PARTS
        low = self.slicing.bound(number, 0)
        mine = self.slicing.bound(number, self.task.me + 1) - self.slicing.bound(number, self.task.me)
        outgoing = self.task.source + HEADER + low
        if self.task.compressed:
            self.task.encode(block.outgoing, HEADER + low, HEADER + self.slicing.end(number))
            outgoing = block.outgoing
        for other in range(4 * others):
            block.requests[other] = MPI_REQUEST_NULL
        pthread_mutex_lock(&mpi_mutex)
        for other in range(others):
            member = (self.task.me + 1 + other) % self.task.size
            begin = self.slicing.bound(number, member) - low
            end = self.slicing.bound(number, member + 1) - low
            if mine > 0:
                self._check(MPI_Irecv(block.parts + other * mine, <int>mine, MPI_BYTE,
                                      self.task.members[member], self.task.tag + 1 + k, self.comm,
                                      &block.requests[other]))
            if end > begin:
                self._check(MPI_Isend(outgoing + begin, <int>(end - begin), MPI_BYTE,
                                      self.task.members[member], self.task.tag + 1 + k, self.comm,
                                      &block.requests[others + other]))
                self._check(MPI_Irecv(block.mean + begin, <int>(end - begin), MPI_BYTE,
                                      self.task.members[member], self.task.tag + 1 + DEPTH + k, self.comm,
                                      &block.requests[2 * others + other]))
                self.task.bytes_sent += end - begin
        pthread_mutex_unlock(&mpi_mutex)

    cdef void _average(self, int k) noexcept nogil:
        """Average this member's slice of a block, and send the mean to the others."""
        cdef Block *block = &self.blocks[k]
        cdef int others = self.task.size - 1
        cdef Py_ssize_t low = self.slicing.bound(block.number, 0)
        cdef Py_ssize_t begin = self.slicing.bound(block.number, self.task.me)
        cdef Py_ssize_t end = self.slicing.bound(block.number, self.task.me + 1)
        cdef Py_ssize_t mine = end - begin
        cdef Py_ssize_t first, count, offset
        cdef char *own = block.outgoing + (begin - low)
        cdef int i, other
        if not self.task.compressed:
            own = self.task.source + HEADER + begin
        for i in range(self.wire.count):
            count = self.wire.part(i, HEADER + begin, HEADER + end, &first)
            if count == 0:
                continue
            offset = self.wire.begin[i] + first * self.wire.kernels[i].itemsize - HEADER - begin
            self.vectors[self.task.me] = own + offset
            for other in range(others):
                self.vectors[(self.task.me + 1 + other) % self.task.size] = (
                    block.parts + other * mine + offset)
            self.wire.kernels[i].mean(block.mean + (begin - low) + offset, self.vectors, self.shares,
                                 self.task.size, count)
        block.stage = MEANS
        if mine == 0:
            return
        pthread_mutex_lock(&mpi_mutex)
        for other in range(others):
            self._check(MPI_Isend(block.mean + (begin - low), <int>mine, MPI_BYTE,
                                  self.task.members[(self.task.me + 1 + other) % self.task.size],
                                  self.task.tag + 1 + DEPTH + k, self.comm,
                                  &block.requests[3 * others + other]))
        pthread_mutex_unlock(&mpi_mutex)
        self.task.bytes_sent += others * mine

    cdef void _check(self, int rc) noexcept nogil:
        if rc != MPI_SUCCESS:
            self.task.error = rc
