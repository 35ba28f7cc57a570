"""An allreduce by recursive doubling, for vectors too short for slices.

The vector is averaged block by block, so that a block stays in cache through all phases of the
schedule and the scratch memory is two blocks, whatever the vector's length. Means are sent, never
sums, which would overflow fp16; the first block carries their weights and counts.
"""

from libc.stdlib cimport free
from mpi4py.libmpi cimport (
    MPI_BYTE,
    MPI_REQUEST_NULL,
    MPI_SUCCESS,
    MPI_Irecv,
    MPI_Isend,
)
from mpi4py.MPI cimport Comm

from collectives.memory.allocation cimport LINE, allocate, round_up
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.exchange.clock cimport now
from collectives.exchange.reduction cimport Reduction
from collectives.memory.layout cimport HEADER, count_in, weight_in
from collectives.protocols.schedule cimport ADD, NOTHING, TAKE, Schedule

cdef enum:
    BLOCK_BYTES = 512 * 1024


cdef class Doubling:
    """The reduction's allreduce; the `Schedule` gives each member's exchanges."""

    def __init__(self, Comm comm, Reduction reduction):
        cdef Py_ssize_t space
        self.comm = comm.ob_mpi
        self.schedule = Schedule()
        self.reduction = reduction
        self.layout = reduction.layout
        self.block = min(reduction.layout.size, HEADER + BLOCK_BYTES)
        space = round_up(self.block, LINE)
        self.memory = allocate(2 * space)
        self.partial = self.memory
        self.incoming = self.memory + space

    def __dealloc__(self):
        free(self.memory)

    cdef void begin(self) noexcept nogil:
        self.low = 0
        self.schedule.begin(self.reduction.size, self.reduction.me)
        self._begin_block()

    cdef bint progress(self) noexcept nogil:
        """Progress without blocking; return whether the mean is complete."""
        cdef long long began
        while self.low < self.reduction.end and self.reduction.error == 0:
            if not self.reduction.have_arrived(self.requests, 2):
                return False
            began = now()
            self.reduction.progress_count += 1
            self._receive()
            self.reduction.worked(began)
        return self.reduction.error == 0

    cdef void _begin_block(self) noexcept nogil:
        self.high = min(self.reduction.end, self.low + self.block)
        self.summed = False
        if self.low == 0:
            self.reduction.weight = self.reduction.own_weight
            weight_in(self.reduction.source)[0] = self.reduction.weight
            self.reduction.count = self.reduction.own_count
            count_in(self.reduction.source)[0] = self.reduction.count
        if self.schedule.done:
            self.high = self.reduction.end
            self._finish_block(self.reduction.source + self.low, 1, NULL, 0)
        else:
            self._post()

    cdef char *_mean(self) noexcept nogil:
        """Return this block of the partial mean accumulated so far."""
        return self.partial if self.summed else self.reduction.source + self.low

    cdef void _post(self) noexcept nogil:
        cdef int count = <int>(self.high - self.low)
        cdef int peer = self.reduction.members[self.schedule.peer]
        cdef int rc = MPI_SUCCESS
        self.requests[0] = MPI_REQUEST_NULL
        self.requests[1] = MPI_REQUEST_NULL
        pthread_mutex_lock(&mpi_mutex)
        if self.schedule.receives != NOTHING:
            rc = MPI_Irecv(
                self.incoming, count, MPI_BYTE, peer, self.reduction.tag + self.schedule.phase,
                self.comm,
                &self.requests[0],
            )
        if self.schedule.sends and rc == MPI_SUCCESS:
            rc = MPI_Isend(
                self._mean(), count, MPI_BYTE, peer, self.reduction.tag + self.schedule.phase,
                self.comm,
                &self.requests[1],
            )
            self.reduction.bytes_sent += count
        pthread_mutex_unlock(&mpi_mutex)
        if rc != MPI_SUCCESS:
            self.reduction.error = rc

    cdef void _receive(self) noexcept nogil:
        """Average the completed messages of the current step and advance to the next step."""
        cdef int received = self.schedule.receives
        cdef int phase = self.schedule.phase
        cdef double share_ours = 0, share_theirs = 0, total
        if self.low == 0 and received == ADD:
            self.ours[phase] = self.reduction.weight
            self.theirs[phase] = weight_in(self.incoming)[0]
            self.reduction.weight += self.theirs[phase]
            self.reduction.count += count_in(self.incoming)[0]
        elif self.low == 0 and received == TAKE:
            self.reduction.weight = weight_in(self.incoming)[0]
            self.reduction.count = count_in(self.incoming)[0]
        if received == ADD:
            total = self.ours[phase] + self.theirs[phase]
            if total > 0:
                share_ours = self.ours[phase] / total
                share_theirs = self.theirs[phase] / total
        self.schedule.advance()
        if not self.schedule.done:
            if received == ADD:
                self._combine(share_ours, share_theirs)
            self._post()
        elif received == ADD:
            self._finish_block(self._mean(), share_ours, self.incoming, share_theirs)
        else:
            self._finish_block(self.incoming if received == TAKE else self._mean(), 1, NULL, 0)

    cdef void _combine(self, double share_ours, double share_theirs) noexcept nogil:
        """Write the mean of the own and the received block to `partial`, to be sent on."""
        cdef char *mean = self._mean()
        cdef Py_ssize_t begin, first, count
        cdef int i
        if self.low == 0:
            weight_in(self.partial)[0] = self.reduction.weight
            count_in(self.partial)[0] = self.reduction.count
        for i in range(self.layout.count):
            count = self.layout.part(i, self.low, self.high, &first)
            begin = self.layout.begin[i] + first * self.layout.itemsize[i] - self.low
            self.layout.space.combine(i, self.partial + begin, mean + begin, share_ours,
                                      self.incoming + begin, share_theirs, count)
        self.summed = True

    cdef void _finish_block(
        self, const char *a, double share_a, const char *b, double share_b
    ) noexcept nogil:
        """Write this block of the result, from `a` and, unless NULL, `b`; begin the next block."""
        if self.low == 0:
            self.reduction.count /= self.reduction.size
        self.reduction.write(self.low, self.high, a, share_a, b, share_b)
        self.low = self.high
        if self.low < self.reduction.end:
            self.schedule.begin(self.reduction.size, self.reduction.me)
            self._begin_block()
