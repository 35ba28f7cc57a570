"""Vectors in a device's memory: passes are kernels and copies in the device's queue."""

from collectives.memory.allocation cimport Memory
from collectives.memory.device_memory cimport DeviceMemory, ExportedMemory, MappedMemory
from collectives.memory.driver cimport (
    SUCCESS,
    Address,
    Handle,
    PinnedMemory,
    cu,
    relax_own_thread,
)

from collectives.memory.space import CODES

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned)

cdef enum:
    # Microseconds between queries.
    PAUSE = 50


cdef inline Py_ssize_t size_of(char code) noexcept nogil:
    """Return the bytes of a number, given the code of its dtype."""
    return 8 if code == c"d" else 4 if code == c"f" else 2


cdef class DeviceSpace(Space):
    """The memory of a device; pointers are addresses in it, except those of flags.

    Spaces with the same queue share the order of its passes, and its tickets. Only passes that
    return a value wait for the device.

    Args:
        dtypes: names of the arrays' dtypes.
        sent: names of the dtypes sent in their place.
        queue: the device's queue.
        block: bytes of the longest block in which vectors are averaged.

    Raises:
        CudaError: there is no pinned memory for a flag.
    """

    def __init__(self, dtypes, sent, DeviceQueue queue, Py_ssize_t block=1 << 20):
        self.deferred = True
        self.block = block
        self.queue = queue
        self.kept_codes = b"".join(CODES[name] for name in (*dtypes, *sent))
        self.dtypes = self.kept_codes
        self.wires = self.dtypes + len(dtypes)
        self.flag = self.new_flag()

    cdef Memory allocate(self, Py_ssize_t size):
        return DeviceMemory(size, self.queue.context)

    cdef Memory export(self, Py_ssize_t size):
        return ExportedMemory(size, self.queue.context)

    cdef handle_of(self, Memory memory):
        return (<ExportedMemory>memory).name

    cdef Memory map(self, handle):
        return MappedMemory(handle, self.queue.context)

    cdef int *new_flag(self) except NULL:
        cdef PinnedMemory memory = PinnedMemory(sizeof(int), self.queue.context)
        self.flags.append(memory)
        return <int *>memory.address

    cdef int error(self) noexcept nogil:
        self.queue.look_for_errors()
        return self.queue.error

    cdef void attach(self) noexcept nogil:
        """Make the device's context current if the thread has none: CUDA-aware MPIs need one.

        In the progress thread, their calls then break no graph that is being captured.
        """
        cdef Handle current = NULL
        relax_own_thread()
        if cu.CtxGetCurrent(&current) == SUCCESS and current == NULL:
            cu.CtxSetCurrent(self.queue.context.handle)

    cdef long long begun(self) noexcept nogil:
        return self.queue.begun()

    cdef bint over(self, long long ticket) noexcept nogil:
        return self.queue.over(ticket)

    cdef void copy(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        cdef int mode
        if size > 0 and self.queue.enter(&mode):
            self.queue.leave(mode, b"cuMemcpyDtoDAsync", cu.MemcpyDtoDAsync(
                <Address>to, <Address>source, size, self.queue.stream))

    cdef void copy_away(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        self.copy(to, source, size)

    cdef void zero(self, char *to, Py_ssize_t size) noexcept nogil:
        cdef int mode
        if size > 0 and self.queue.enter(&mode):
            self.queue.leave(mode, b"cuMemsetD8Async", cu.MemsetD8Async(
                <Address>to, 0, size, self.queue.stream))

    cdef void combine(
        self, int i, char *to, const char *a, double share_a, const char *b, double share_b,
        Py_ssize_t count
    ) noexcept nogil:
        cdef int mode
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.combine(
                self.dtypes[i], <Address>to, <Address>a, share_a, <Address>b, share_b, count,
                self.queue.stream))

    cdef void mean(
        self, int i, char **to, int takers, const char **vectors, const double *shares, int size,
        Py_ssize_t count
    ) noexcept nogil:
        """See `Space`; an error if more than MOST_MEMBERS vectors have nonzero shares."""
        cdef int mode, k
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.mean(
                self.dtypes[i], <Address>to[0], vectors, shares, size, count, self.queue.stream))
        for k in range(1, takers):
            self.copy(to[k], to[0], count * size_of(self.dtypes[i]))

    cdef void add_change(
        self, int i, char *to, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        cdef int mode
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.add_change(
                self.dtypes[i], <Address>to, <Address>snapshot, <Address>x, <Address>returned,
                count, self.queue.stream))

    cdef void begin_all_finite(
        self, int *flag, int i, const char *x, Py_ssize_t count
    ) noexcept nogil:
        cdef int mode
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.all_finite(
                self.dtypes[i], flag, <Address>x, count, self.queue.stream))

    cdef void begin_finite_change(
        self, int *flag, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        cdef int mode
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.finite_change(
                self.dtypes[i], flag, <Address>snapshot, <Address>x, <Address>returned, count,
                self.queue.stream))

    cdef bint all_finite(self, int i, const char *x, Py_ssize_t count) noexcept nogil:
        """See `Space`; wait for the device, by queries. False if a pass has failed."""
        self.flag[0] = 1
        self.begin_all_finite(self.flag, i, x, count)
        return self._answer()

    cdef bint finite_change(
        self, int i, const char *snapshot, const char *x, const char *returned, Py_ssize_t count
    ) noexcept nogil:
        """See `Space`; wait for the device, by queries. False if a pass has failed."""
        self.flag[0] = 1
        self.begin_finite_change(self.flag, i, snapshot, x, returned, count)
        return self._answer()

    cdef bint _answer(self) noexcept nogil:
        cdef long long ticket = self.begun()
        while not self.over(ticket):
            usleep(PAUSE)
        return self.queue.error == SUCCESS and self.flag[0] != 0

    cdef void encode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        cdef int mode
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.encode(
                self.dtypes[i], self.wires[i], <Address>to, <Address>source, <Address>reference,
                count, self.queue.stream))

    cdef void decode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        cdef int mode
        if self.queue.enter(&mode):
            self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.decode(
                self.dtypes[i], self.wires[i], <Address>to, <Address>source, <Address>reference,
                count, self.queue.stream))
