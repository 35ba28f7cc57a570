# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One allreduce in flight: the mean of its members' vectors, by non-blocking messages.

The vector is averaged block by block, so that a block stays in cache through all phases of the
schedule and the scratch memory is two blocks, whatever the vector's length. What is sent begins
with a header whose first element is the vector's weight; it is summed with the rest, and divides.
"""

from libc.string cimport memcpy
from mpi4py.libmpi cimport (
    MPI_DOUBLE,
    MPI_FLOAT,
    MPI_REQUEST_NULL,
    MPI_STATUSES_IGNORE,
    MPI_SUCCESS,
    MPI_Comm,
    MPI_Irecv,
    MPI_Isend,
    MPI_Testall,
)
from mpi4py.MPI cimport Comm

from collectives._kernels cimport add, mean, mean_of_sum, real
from collectives.protocols.schedule cimport ADD, NOTHING, TAKE, Schedule

cdef enum:
    BLOCK_BYTES = 512 * 1024
    CHUNK_BYTES = 8 * 1024

pthread_mutex_init(&mpi_mutex, NULL)


cdef class Exchange:
    """The engine's allreduce; its members' schedule says who exchanges with whom."""

    def __init__(self, Comm comm, Py_ssize_t length, bint is_double):
        self.comm = comm.ob_mpi
        self.schedule = Schedule()
        self.is_double = is_double
        self.itemsize = 8 if is_double else 4
        self.length = HEADER + length
        self.block = min(self.length, HEADER + BLOCK_BYTES // self.itemsize)

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        char *source, char *target, char *copy, char *saved
    ) noexcept nogil:
        """Average `source`, a header and a vector, into `target`, a vector, over the members.

        `target` may lie in `source`. It is left alone if the total weight is zero. `copy` and
        `saved` may be NULL: the mean goes to `copy` as well, and what was in `target` to `saved`.
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
        while self.low < self.length and self.error == 0:
            pthread_mutex_lock(&mpi_mutex)
            rc = MPI_Testall(2, self.requests, &arrived, MPI_STATUSES_IGNORE)
            pthread_mutex_unlock(&mpi_mutex)
            if rc != MPI_SUCCESS:
                self.error = rc
                return False
            if not arrived:
                return False
            self.moves += 1
            self._receive()
        return self.error == 0

    cdef void _begin_block(self) noexcept nogil:
        self.high = min(self.length, self.low + self.block)
        self.summed = False
        if self.schedule.done:
            self.high = self.length
            self._finish_block(self.source + self.low * self.itemsize, NULL)
        else:
            self._post()

    cdef void _post(self) noexcept nogil:
        cdef int count = <int>(self.high - self.low)
        cdef int peer = self.members[self.schedule.peer]
        cdef char *sum = self.partial if self.summed else self.source + self.low * self.itemsize
        cdef int rc = MPI_SUCCESS
        self.requests[0] = MPI_REQUEST_NULL
        self.requests[1] = MPI_REQUEST_NULL
        pthread_mutex_lock(&mpi_mutex)
        if self.schedule.receives != NOTHING:
            rc = MPI_Irecv(
                self.incoming, count, MPI_DOUBLE if self.is_double else MPI_FLOAT,
                peer, self.tag + self.schedule.phase, self.comm, &self.requests[0],
            )
        if self.schedule.sends and rc == MPI_SUCCESS:
            rc = MPI_Isend(
                sum, count, MPI_DOUBLE if self.is_double else MPI_FLOAT,
                peer, self.tag + self.schedule.phase, self.comm, &self.requests[1],
            )
            self.bytes_sent += count * self.itemsize
        pthread_mutex_unlock(&mpi_mutex)
        if rc != MPI_SUCCESS:
            self.error = rc

    cdef void _receive(self) noexcept nogil:
        """The messages of the present step are through: add, and go on to the next."""
        cdef int received = self.schedule.receives
        cdef char *sum = self.partial if self.summed else self.source + self.low * self.itemsize
        self.schedule.advance()
        if self.schedule.done:
            if received == TAKE:
                self._finish_block(self.incoming, NULL)
            else:
                self._finish_block(sum, self.incoming if received == ADD else NULL)
            return
        if received == ADD:
            if self.is_double:
                add(<double *>self.partial, <double *>sum, <double *>self.incoming,
                    self.high - self.low)
            else:
                add(<float *>self.partial, <float *>sum, <float *>self.incoming,
                    self.high - self.low)
            self.summed = True
        self._post()

    cdef void _finish_block(self, const char *a, const char *b) noexcept nogil:
        """Write the mean of this block, from a or a + b, and begin the next one."""
        cdef Py_ssize_t skip = HEADER if self.low == 0 else 0
        cdef Py_ssize_t size = (self.high - self.low - skip) * self.itemsize
        cdef Py_ssize_t offset = (self.low + skip - HEADER) * self.itemsize
        cdef Py_ssize_t done = 0
        cdef Py_ssize_t chunk
        if self.low == 0:
            if self.is_double:
                self.weight = (<double *>a)[0] + ((<double *>b)[0] if b != NULL else 0)
            else:
                self.weight = (<float *>a)[0] + ((<float *>b)[0] if b != NULL else 0)
        a += skip * self.itemsize
        if b != NULL:
            b += skip * self.itemsize
        # In chunks that stay in the first-level cache from the mean to its copy.
        while done < size:
            chunk = min(size - done, CHUNK_BYTES)
            self._finish_chunk(offset + done, a + done, b + done if b != NULL else NULL, chunk)
            done += chunk
        self.low = self.high
        if self.low < self.length:
            self.schedule.begin(self.size, self.schedule.me)
            self._begin_block()

    cdef void _finish_chunk(
        self, Py_ssize_t offset, const char *a, const char *b, Py_ssize_t size
    ) noexcept nogil:
        cdef char *out = self.target + offset
        if self.saved != NULL:
            memcpy(self.saved + offset, out, size)
        if self.weight == 0:
            return
        if self.is_double:
            self._write_mean(<double *>out, <double *>a, <double *>b, size // 8)
        else:
            self._write_mean(<float *>out, <float *>a, <float *>b, size // 4)
        if self.copy != NULL:
            memcpy(self.copy + offset, out, size)

    cdef void _write_mean(
        self, real *out, const real *a, const real *b, Py_ssize_t count
    ) noexcept nogil:
        cdef real weight = <real>self.weight
        if b != NULL:
            mean_of_sum(out, a, b, weight, count)
        elif out != a or weight != 1:
            mean(out, a, weight, count)
