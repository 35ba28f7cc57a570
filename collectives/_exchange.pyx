# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One allreduce in flight: the mean of its members' vectors, by non-blocking messages.

The vector is averaged block by block, so that a block stays in cache through all phases of the
schedule and the scratch memory is two blocks, whatever the vector's length. What travels are
means, never sums, which would overflow half precision; the first block brings their weights along.
"""

from libc.string cimport memcpy
from mpi4py.libmpi cimport (
    MPI_BYTE,
    MPI_REQUEST_NULL,
    MPI_STATUSES_IGNORE,
    MPI_SUCCESS,
    MPI_Comm,
    MPI_Irecv,
    MPI_Isend,
    MPI_Testall,
)
from mpi4py.MPI cimport Comm

from collectives._rhythm cimport now
from collectives._vectors cimport HEADER, Layout, weight_of
from collectives.protocols.schedule cimport ADD, NOTHING, TAKE, Schedule

cdef enum:
    BLOCK_BYTES = 512 * 1024
    CHUNK_BYTES = 8 * 1024

pthread_mutex_init(&mpi_mutex, NULL)


cdef class Exchange:
    """The engine's allreduce; its members' schedule says who exchanges with whom."""

    def __init__(self, Comm comm, Layout layout):
        self.comm = comm.ob_mpi
        self.schedule = Schedule()
        self.layout = layout
        self.block = min(layout.size, HEADER + BLOCK_BYTES)

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        char *source, char **target, char **copy, char **saved
    ) noexcept nogil:
        """Average `source`, a vector in our memory, into the arrays of `target`, over the members.

        `target` may be the arrays of `source`. It is left alone if the total weight is zero. `copy`
        and `saved` may be NULL: the mean goes to `copy` as well, and what was in `target` to
        `saved`.
        """
        self.members = members
        self.size = size
        self.tag = tag
        self.source = source
        self.target = target
        self.copy = copy
        self.saved = saved
        self.low = 0
        self.schedule.begin(size, me)
        self._begin_block()

    cdef bint progress(self) noexcept nogil:
        """Do what can be done without waiting; return whether the mean is there."""
        cdef int arrived, rc
        cdef long long began
        while self.low < self.layout.size and self.error == 0:
            pthread_mutex_lock(&mpi_mutex)
            rc = MPI_Testall(2, self.requests, &arrived, MPI_STATUSES_IGNORE)
            pthread_mutex_unlock(&mpi_mutex)
            if rc != MPI_SUCCESS:
                self.error = rc
                return False
            if not arrived:
                return False
            began = now()
            self.moves += 1
            self._receive()
            self.busy_ns += now() - began
        return self.error == 0

    cdef void _begin_block(self) noexcept nogil:
        self.high = min(self.layout.size, self.low + self.block)
        self.summed = False
        if self.low == 0:
            self.weight = weight_of(self.source)[0]
        if self.schedule.done:
            self.high = self.layout.size
            self._finish_block(self.source + self.low, 1, NULL, 0)
        else:
            self._post()

    cdef char *_mean(self) noexcept nogil:
        """This block of the mean of what has come together here so far."""
        return self.partial if self.summed else self.source + self.low

    cdef void _post(self) noexcept nogil:
        cdef int count = <int>(self.high - self.low)
        cdef int peer = self.members[self.schedule.peer]
        cdef int rc = MPI_SUCCESS
        self.requests[0] = MPI_REQUEST_NULL
        self.requests[1] = MPI_REQUEST_NULL
        pthread_mutex_lock(&mpi_mutex)
        if self.schedule.receives != NOTHING:
            rc = MPI_Irecv(
                self.incoming, count, MPI_BYTE, peer, self.tag + self.schedule.phase, self.comm,
                &self.requests[0],
            )
        if self.schedule.sends and rc == MPI_SUCCESS:
            rc = MPI_Isend(
                self._mean(), count, MPI_BYTE, peer, self.tag + self.schedule.phase, self.comm,
                &self.requests[1],
            )
            self.bytes_sent += count
        pthread_mutex_unlock(&mpi_mutex)
        if rc != MPI_SUCCESS:
            self.error = rc

    cdef void _receive(self) noexcept nogil:
        """The messages of the present step are through: average, and go on to the next."""
        cdef int received = self.schedule.receives
        cdef int phase = self.schedule.phase
        cdef double share_ours = 0, share_theirs = 0, total
        if self.low == 0 and received == ADD:
            self.ours[phase] = self.weight
            self.theirs[phase] = weight_of(self.incoming)[0]
            self.weight += self.theirs[phase]
        elif self.low == 0 and received == TAKE:
            self.weight = weight_of(self.incoming)[0]
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
        """Put the mean of ours and theirs, which are to travel further, into `partial`."""
        cdef char *mean = self._mean()
        cdef Py_ssize_t low, high
        cdef int i
        if self.low == 0:
            weight_of(self.partial)[0] = self.weight
        for i in range(self.layout.count):
            low = max(self.layout.begin[i], self.low) - self.low
            high = min(self.layout.begin[i] + self.layout.bytes[i], self.high) - self.low
            if low < high:
                self.layout.kernels[i].combine(
                    self.partial + low, mean + low, share_ours, self.incoming + low, share_theirs,
                    (high - low) // self.layout.kernels[i].itemsize,
                )
        self.summed = True

    cdef void _finish_block(
        self, const char *a, double share_a, const char *b, double share_b
    ) noexcept nogil:
        """Write this block of the result, from `a` and, unless NULL, `b`; begin the next block."""
        cdef Py_ssize_t low, high
        cdef int i
        for i in range(self.layout.count):
            low = max(self.layout.begin[i], self.low)
            high = min(self.layout.begin[i] + self.layout.bytes[i], self.high)
            if low < high:
                self._finish_array(i, low, high, a - self.low, share_a,
                                   b - self.low if b != NULL else NULL, share_b)
        self.low = self.high
        if self.low < self.layout.size:
            self.schedule.begin(self.size, self.schedule.me)
            self._begin_block()

    cdef void _finish_array(
        self, int i, Py_ssize_t low, Py_ssize_t high,
        const char *a, double share_a, const char *b, double share_b
    ) noexcept nogil:
        """Write part of one array, in chunks that stay in the first-level cache for the copy."""
        cdef Py_ssize_t chunk, offset
        cdef char *out
        while low < high:
            chunk = min(high - low, CHUNK_BYTES)
            offset = low - self.layout.begin[i]
            out = self.target[i] + offset
            if self.saved != NULL:
                memcpy(self.saved[i] + offset, out, chunk)
            if self.weight > 0:
                if b != NULL:
                    self.layout.kernels[i].combine(
                        out, a + low, share_a, b + low, share_b,
                        chunk // self.layout.kernels[i].itemsize)
                elif out != a + low:
                    memcpy(out, a + low, chunk)
                if self.copy != NULL:
                    memcpy(self.copy[i] + offset, out, chunk)
            low += chunk
