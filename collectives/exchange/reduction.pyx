"""The sources and destinations of one allreduce, and its passes over memory."""

from mpi4py.libmpi cimport MPI_STATUSES_IGNORE, MPI_SUCCESS, MPI_Request, MPI_Testall

from collectives.exchange.arrival cimport Arrival
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.layout cimport Layout
from collectives.recording.recorder cimport exchanged

from collectives.exchange.compression import compression

cdef enum:
    # Elements per pass, so that the next pass finds the result in the first-level cache.
    CHUNK = 2048
    # Bytes of a vector whose copies would only evict other data from the last-level cache.
    LONG = 8 * 1024 * 1024


cdef class Reduction:
    """An allreduce's source and targets, and its result's weight; reused by the next one.

    Args:
        layout: of the vectors.
        wire_dtype: "float16" or "bfloat16", to send wider numbers in this dtype, as differences
            from a vector equal on all ranks; None: in their own dtype.
    """

    def __init__(self, Layout layout, wire_dtype):
        self.layout = layout
        self.arrival = Arrival()
        self.compression = compression(layout, wire_dtype)
        self.wire = layout if self.compression is None else self.compression.wire
        self.space = layout.space if self.compression is None else self.compression.space

    cdef void average_arrays(self, int count) noexcept nogil:
        """Average so many of the arrays; of the others each member keeps its own."""
        self.averaged = count
        self.end = self.wire.size if count == self.wire.count else self.wire.begin[count]

    cdef void worked(self, long long began) noexcept nogil:
        """Count the time since then as spent on others' data."""
        cdef long long end = now()
        self.busy_ns += end - began
        exchanged(&self.exchanged, self.number, began, end)

    cdef bint have_arrived(self, MPI_Request *requests, int count) noexcept nogil:
        """Return whether all these messages are complete."""
        cdef int rc, done = 0
        pthread_mutex_lock(&mpi_mutex)
        rc = MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE)
        pthread_mutex_unlock(&mpi_mutex)
        if rc != MPI_SUCCESS:
            self.error = rc
        return done and rc == MPI_SUCCESS

    cdef void remember(self, const char *vector) noexcept nogil:
        """Send compressed vectors as differences from this one, equal on all ranks."""
        if self.compression is not None:
            self.compression.remember(vector)

    cdef char *contiguous(self, char **arrays, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
        """Return the address at which these bytes of a vector are contiguous for MPI, or NULL.

        In the engine's memory they always are; the application's arrays may be anywhere, and on a
        device its allocator may move or free them while MPI still has them registered. Nor can MPI
        use memory that other processes have mapped: UCX maps it a second time, which CUDA refuses
        (openucx/ucx#3192).
        """
        cdef int i
        if self.exported or arrays == self.user and self.space.deferred:
            return NULL
        if arrays != self.user:
            return arrays[0] - self.layout.begin[0] + low
        for i in range(self.layout.count):
            if self.layout.begin[i] <= low and high <= self.layout.begin[i] + self.layout.bytes[i]:
                return arrays[i] + (low - self.layout.begin[i])
        return NULL

    # Arrays that arrive from a device and return there

    cdef bint has_user(self, Py_ssize_t end) noexcept nogil:
        """Return whether the application's arrays, if used, are here up to this byte of `wire`."""
        return (self.arrival.arrays == NULL
                or not (self.lent or self.target == self.user or self.copy == self.user)
                or self.arrival.has(self.user, self._end_in_layout(end)))

    cdef void give_back_user(self, Py_ssize_t end) noexcept nogil:
        """Return the application's arrays up to this byte of `wire` if they receive the mean."""
        if self.arrival.arrays != NULL and self.weight > 0:
            if self.target == self.user or self.copy == self.user:
                self.arrival.give_back(self.user, self._end_in_layout(end))

    cdef Py_ssize_t _end_in_layout(self, Py_ssize_t end) noexcept nogil:
        """Return the byte of `layout` that corresponds to this end of a block of `wire`."""
        return end if self.compression is None else self.compression.end_in_layout(end)

    # Blocks

    cdef char *outgoing(self, char *space, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
        """Return the data to send for the bytes `low` to `high` of `wire`, in `space` if needed.

        Blocks must be requested in order.
        """
        cdef bint compresses = self.compression is not None
        cdef Py_ssize_t first, count, begin, bytes
        cdef char *to
        cdef char *source
        cdef int i
        self.taken = high
        if not compresses and not self.lent:
            return self._sendable(space, low, high)
        if not compresses and not self.keeps:
            to = self.contiguous(self.user, low, high)
            if to != NULL:
                return to
        for i in range(self.wire.count):
            count = self.wire.part(i, low, high, &first)
            if count == 0:
                continue
            bytes = count * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            source = self.source + self.layout.begin[i] + begin
            if self.lent and self.keeps:
                self.space.copy(source, self.user[i] + begin, bytes)
            elif self.lent:
                source = self.user[i] + begin
            to = space + self.wire.begin[i] + first * self.wire.itemsize[i] - low
            if compresses:
                self.compression.encode(i, first, count, to, source)
            elif not self.keeps:
                self.space.copy(to, source, bytes)
        return space if compresses or not self.keeps else self._sendable(space, low, high)

    cdef char *_sendable(self, char *space, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
        """Return these bytes of the source where MPI may read them: in `space` if needed."""
        if not self.exported:
            return self.source + low
        self.space.copy(space, self.source + low, high - low)
        return space

    cdef void adopt(self, bint whole) noexcept nogil:
        """Copy the rest of the application's arrays to the source and continue from there.

        If `whole`, copy all of the arrays, including what has been averaged already.
        """
        cdef Py_ssize_t first, begin
        cdef int i
        if not self.lent:
            return
        if whole or self.weight == 0:
            self.taken = 0  # no mean will replace what was taken
        for i in range(self.wire.count):
            if self.wire.part(i, self.taken, self.wire.size, &first) == 0:
                continue
            begin = first * self.layout.itemsize[i]
            self.space.copy(self.source + self.layout.begin[i] + begin, self.user[i] + begin,
                            self.layout.bytes[i] - begin)
        self.lent = False

    cdef char *incoming(self, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
        """Return where the mean of these bytes can be received, or NULL; save the old content."""
        cdef char *to = NULL
        if self.compression is None and self.weight > 0:
            to = self.contiguous(self.target, low, high)
        if to != NULL and self.saved != NULL:
            self._copy_target(self.saved, low, high)
        return to

    cdef void finish(self, Py_ssize_t low, Py_ssize_t high, char *mean) noexcept nogil:
        """Write the mean of these bytes to the target, unless received there, and the copy."""
        if self.compression is not None or self.contiguous(self.target, low, high) != mean:
            self.write(low, high, mean, 1, NULL, 0)
        elif self.copy != NULL:
            self._copy_target(self.copy, low, high)

    cdef void _copy_target(self, char **to, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
        """Copy these bytes of the target to the arrays `to`."""
        cdef Py_ssize_t first, count, begin
        cdef int i
        for i in range(self.layout.count):
            count = self.layout.part(i, low, high, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            if self.layout.size < LONG:
                self.space.copy(to[i] + begin, self.target[i] + begin, count)
            elif count > 0:
                self.space.copy_away(to[i] + begin, self.target[i] + begin, count)

    cdef void write(
        self, Py_ssize_t low, Py_ssize_t high,
        const char *a, double share_a, const char *b, double share_b
    ) noexcept nogil:
        """Write the bytes `low` to `high` of the mean, from `a` and, unless NULL, `b`."""
        cdef Py_ssize_t first, count, begin
        cdef bint decodes = self.compression is not None
        cdef int i
        for i in range(self.wire.count):
            count = self.wire.part(i, low, high, &first)
            if count == 0:
                continue
            begin = self.wire.begin[i] + first * self.wire.itemsize[i] - low
            self._write_array(decodes, i, first, count, a + begin, share_a,
                              b + begin if b != NULL else NULL, share_b)

    cdef void write_others(self) noexcept nogil:
        """Write what this member contributes of the arrays that are not averaged as their mean."""
        cdef char *own
        cdef int i
        for i in range(self.averaged, self.layout.count):
            own = self.source + self.layout.begin[i]
            if self.lent and self.keeps:
                self.space.copy(own, self.user[i], self.layout.bytes[i])
            elif self.lent:
                own = self.user[i]
            if self.saved != NULL:
                self.space.copy(self.saved[i], self.target[i], self.layout.bytes[i])
            if self.has_own:
                if self.target[i] != own:
                    self.space.copy(self.target[i], own, self.layout.bytes[i])
                if self.copy != NULL:
                    self.space.copy(self.copy[i], self.target[i], self.layout.bytes[i])

    cdef void write_source(self) noexcept nogil:
        """Write the source as the mean of a single member."""
        cdef int i
        for i in range(self.layout.count):
            self._write_array(False, i, 0, self.layout.length[i],
                              self.source + self.layout.begin[i], 1, NULL, 0)

    cdef void _write_array(
        self, bint decodes, int i, Py_ssize_t first, Py_ssize_t count,
        const char *a, double share_a, const char *b, double share_b
    ) noexcept nogil:
        """Write part of one array, in chunks that stay in the first-level cache for the copy."""
        cdef Py_ssize_t itemsize = self.layout.itemsize[i]
        cdef Py_ssize_t sent = self.wire.itemsize[i] if decodes else itemsize
        cdef Py_ssize_t offset, n
        cdef char *out
        while count > 0:
            n = count if self.space.deferred else min(count, CHUNK)
            offset = first * itemsize
            out = self.target[i] + offset
            if self.saved != NULL:
                self.space.copy(self.saved[i] + offset, out, n * itemsize)
            if self.weight > 0:
                if b != NULL:
                    self.space.combine(i, out, a, share_a, b, share_b, n)
                    b += n * sent
                elif decodes:
                    self.compression.decode(i, first, n, out, a)
                elif out != a:
                    self.space.copy(out, a, n * itemsize)
                if self.copy != NULL:
                    self.space.copy(self.copy[i] + offset, out, n * itemsize)
            a += n * sent
            first += n
            count -= n
