# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A copy in pinned host memory of vectors on a device, which the host averages in their place.

Nothing here waits for the device: copies are queued on streams of their own, which wait for the
application's stream on the device, and it for them. The host asks by queries. Copies are in blocks,
so that the first can be averaged while the last are under way.
"""

import time

import numpy

from libc.stdlib cimport calloc, free

from collectives.memory.driver cimport (
    CAPTURE_IMPLICIT,
    DISABLE_TIMING,
    NON_BLOCKING,
    NOT_READY,
    SUCCESS,
    Address,
    Handle,
    PinnedMemory,
    check,
    context_of,
    cu,
    device_of,
    enter,
    leave,
    load,
)
from collectives.memory.device_kernels cimport DeviceKernels, kernels_of
from collectives.memory.layout cimport HEADER, Layout

from collectives.errors import CudaError
from collectives.memory.driver import name_of
from collectives.memory.space import CODES

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef double BETWEEN_QUERIES = 1e-4


cdef class Mirror:
    """One vector's place on the host; `arrays` are its numpy arrays, as of a `Layout`.

    `fetch` copies a vector there. Once it is `checked` the host may begin with the blocks that it
    `has`, and once it has `arrived` with all. What the host makes of them `return_until` copies to
    the device meanwhile, and `give_back` in the end. The application's stream goes on with that when
    it is there.

    Args:
        layout: of the vectors.
        addresses: where the arrays of one of them are, which says on which device.
        block: bytes of a block of copies, a multiple of 64.

    Attributes:
        why_unchecked: why the device does not say whether vectors are finite, so that the host does
            once all of one is there; None: it does.

    Raises:
        ValueError: the first is not in a device's memory.
        CudaError: there is no driver, or one of its functions fails.
    """

    def __init__(self, Layout layout, addresses, Py_ssize_t block):
        cdef int i
        load()
        self.layout = layout
        self.pid = getpid()
        self.kept = []
        self.block = block
        self.blocks = <int>((layout.size - HEADER + block - 1) // block)
        self.finite = UNKNOWN
        self.given_back = layout.size
        self.host = <char **>calloc(layout.count, sizeof(char *))
        self.device = <Address *>calloc(layout.count, sizeof(Address))
        self.code = <char *>calloc(layout.count, sizeof(char))
        self.fetched = <Handle *>calloc(self.blocks, sizeof(Handle))
        if (self.host == NULL or self.device == NULL or self.code == NULL
                or self.fetched == NULL):
            raise MemoryError
        self.context = context_of(device_of(addresses[0]))
        self.current = self.context.handle
        self.memory = PinnedMemory(layout.size - HEADER, self.context)
        self.arrays = []
        for i in range(layout.count):
            self.code[i] = ord(CODES[layout.dtypes[i]])
            self.host[i] = self.memory.address + layout.begin[i] - HEADER
            self.arrays.append(numpy.frombuffer(
                self.memory, layout.dtypes[i], layout.length[i], layout.begin[i] - HEADER))
        self._load_kernels()
        self._make_streams()

    def _load_kernels(self):
        try:
            self.kernels = kernels_of(self.context)
        except CudaError as error:
            self.why_unchecked = str(error)
            return
        self.flag_memory = PinnedMemory(sizeof(int), self.context)
        self.flag = <int *>self.flag_memory.address

    def _make_streams(self):
        """They wait for no other stream by themselves, and go before others where both could."""
        cdef int lowest, highest, mode, i
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            check(b"cuCtxGetStreamPriorityRange", cu.CtxGetStreamPriorityRange(&lowest, &highest))
            check(b"cuStreamCreate", cu.StreamCreateWithPriority(&self.out, NON_BLOCKING, highest))
            check(b"cuStreamCreate", cu.StreamCreateWithPriority(&self.back, NON_BLOCKING, highest))
            check(b"cuEventCreate", cu.EventCreate(&self.ready, DISABLE_TIMING))
            check(b"cuEventCreate", cu.EventCreate(&self.was_checked, DISABLE_TIMING))
            check(b"cuEventCreate", cu.EventCreate(&self.returned, DISABLE_TIMING))
            for i in range(self.blocks):
                check(b"cuEventCreate", cu.EventCreate(&self.fetched[i], DISABLE_TIMING))
        finally:
            leave(mode)

    def __dealloc__(self):
        self._destroy_streams()
        free(self.host)
        free(self.device)
        free(self.code)
        free(self.fetched)

    cdef void _destroy_streams(self) noexcept:
        """What is in them still runs. A fork has them, but not the driver."""
        cdef int mode, i
        if (self.pid == getpid() and self.current != NULL
                and enter(self.current, &mode) == SUCCESS):
            for event in (<size_t>self.ready, <size_t>self.was_checked, <size_t>self.returned):
                if event:
                    cu.EventDestroy(<Handle><size_t>event)
            for i in range(self.blocks):
                if self.fetched[i] != NULL:
                    cu.EventDestroy(self.fetched[i])
            for stream in (<size_t>self.out, <size_t>self.back):
                if stream:
                    cu.StreamDestroy(<Handle><size_t>stream)
            leave(mode)
        self.current = NULL

    @property
    def ordinal(self):
        """The device."""
        return self.context.device

    # To the host

    def point_to(self, addresses, size_t stream):
        """Be the mirror of a vector from now on; the one before has arrived.

        Args:
            addresses: where its arrays are.
            stream: the application's: a handle of the driver's, 0 or 1 for the default one.

        Raises:
            TypeError, ValueError: they are not on the mirror's device, or on none.
            CudaError: a function of the driver fails, or has failed.
            RuntimeError: the stream is being captured into a graph.
        """
        cdef int i, mode
        self.check()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            for i in range(self.layout.count):
                self.device[i] = addresses[i]
                if device_of(self.device[i]) != self.context.device:
                    name = "the vector" if self.layout.single else f"array {i} of the vector"
                    raise TypeError(
                        f"{name} is on device {device_of(self.device[i])}, "
                        f"the collective's are on device {self.context.device}")
            self.stream = <Handle>stream
            self._check_not_capturing()
        finally:
            leave(mode)

    cdef int _check_not_capturing(self) except -1:
        cdef int status = 0
        cdef int result = cu.StreamIsCapturing(self.stream, &status)
        if result == CAPTURE_IMPLICIT or result == SUCCESS and status != 0:
            raise RuntimeError(
                "a CUDA graph is being captured on this stream: a graph cannot hold a "
                "collective, which other ranks take part in; call it between graphs")
        return check(b"cuStreamIsCapturing", result)

    def fetch(self, vector):
        """Begin to copy the vector to the host, as it is when the application's stream gets here.

        Args:
            vector: what keeps its memory.

        Raises:
            CudaError: a function of the driver fails.
        """
        cdef int mode
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            self.kept.append(vector)
            with nogil:
                self._copy_out()
        finally:
            leave(mode)

    cdef int _copy_out(self) except -1 nogil:
        cdef int block
        cdef Py_ssize_t low
        check(b"cuEventRecord", cu.EventRecord(self.ready, self.stream))
        check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.ready, 0))
        # What the host gave back last is still read.
        check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.returned, 0))
        if self.flag != NULL:
            self._check_finite()
        for block in range(self.blocks):
            low = HEADER + block * self.block
            self._copy_block(low, min(low + self.block, self.layout.size))
            check(b"cuEventRecord", cu.EventRecord(self.fetched[block], self.out))
        self.here = 0
        self.given_back = HEADER
        self.fetching = True
        return 0

    cdef int _check_finite(self) except -1 nogil:
        """Have the device say whether the vector is finite, before it copies it."""
        cdef int i
        self.flag[0] = 1
        for i in range(self.layout.count):
            check(b"cuLaunchKernel", self.kernels.all_finite(
                self.code[i], self.flag, self.device[i], self.layout.length[i], self.out))
        check(b"cuEventRecord", cu.EventRecord(self.was_checked, self.out))
        self.unchecked = True
        return 0

    cdef int _copy_block(self, Py_ssize_t low, Py_ssize_t high) except -1 nogil:
        cdef Py_ssize_t first, size, begin
        cdef int i
        for i in range(self.layout.count):
            size = self.layout.part(i, low, high, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            if size > 0:
                check(b"cuMemcpyDtoHAsync", cu.MemcpyDtoHAsync(
                    self.host[i] + begin, self.device[i] + begin, size, self.out))
        return 0

    cdef bint _is_over(self, Handle event) noexcept nogil:
        """Whether the device has come to an event; or never will: see `check`."""
        cdef int result
        cdef int mode
        if self.error != SUCCESS:
            return True
        result = enter(self.current, &mode)
        if result == SUCCESS:
            result = cu.EventQuery(event)
            leave(mode)
        if result == NOT_READY:
            return False
        self.error = result
        return True

    cdef bint checked(self) noexcept nogil:
        """Whether `finite` says what it can of the vector that was fetched; or never will."""
        if self.flag == NULL:
            return self.arrived()
        if self.unchecked:
            if not self._is_over(self.was_checked):
                return False
            self.unchecked = False
            if self.error == SUCCESS:
                self.finite = self.flag[0]
        return True

    cdef bint has(self, Py_ssize_t end) noexcept nogil:
        """Whether the vector is on the host up to this byte; or never will be: see `check`."""
        while self.fetching and HEADER + self.here * self.block < end:
            if not self._is_over(self.fetched[self.here]):
                return False
            self.here += 1
            if self.here == self.blocks or self.error != SUCCESS:
                self.fetching = False
        return True

    cdef bint arrived(self) noexcept nogil:
        """Whether the vector is on the host; or never will be: see `check`."""
        return self.has(self.layout.size)

    def check(self):
        """Raise CudaError where the vector will never be there."""
        if self.error != SUCCESS:
            raise CudaError(f"cuEventQuery returned {name_of(self.error)}")

    def withdraw(self):
        """What is on its way is not wanted: the application's stream goes on once it has gone.

        An error is left to the next call.
        """
        cdef int mode
        if self.fetching and enter(self.current, &mode) == SUCCESS:
            cu.StreamWaitEvent(self.stream, self.fetched[self.blocks - 1], 0)
            leave(mode)

    def wait(self):
        """Wait until the vector is on the host; others' Python goes on meanwhile."""
        while not self.arrived():
            time.sleep(BETWEEN_QUERIES)
        self.check()

    # To the device

    cdef void return_until(self, Py_ssize_t end) noexcept nogil:
        """Begin to copy what the host has made of the vector up to this byte, which is final.

        What is less than a block waits for more of it. An error is left to `give_back`.
        """
        cdef int mode, result
        if end - self.given_back < self.block and end < self.layout.size or self.error != SUCCESS:
            return
        result = enter(self.current, &mode)
        if result == SUCCESS:
            result = self._copy_back(end)
            leave(mode)
        self.error = result

    def give_back(self):
        """Begin to copy what the host has made of it to where it came from, as far as it has not.

        What the application puts into its stream from now on comes after that.
        """
        cdef int mode
        self.check()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            with nogil:
                if self.fetching:  # a call that has not used all of it
                    cu.StreamWaitEvent(self.back, self.fetched[self.blocks - 1], 0)
                check(b"cuMemcpyHtoDAsync", self._copy_back(self.layout.size))
                check(b"cuEventRecord", cu.EventRecord(self.returned, self.back))
                check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.stream, self.returned, 0))
        finally:
            leave(mode)
        self.kept = [self.kept.pop()]

    cdef int _copy_back(self, Py_ssize_t end) noexcept nogil:
        """Copy from where it was given back to this byte; return the driver's result."""
        cdef Py_ssize_t first, size, begin
        cdef int i, result
        for i in range(self.layout.count):
            size = self.layout.part(i, self.given_back, end, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            if size > 0:
                result = cu.MemcpyHtoDAsync(
                    self.device[i] + begin, self.host[i] + begin, size, self.back)
                if result != SUCCESS:
                    return result
        self.given_back = end
        return SUCCESS

    def forget(self):
        """What has arrived does not go back: the application's arrays are used no longer."""
        self.kept.clear()

    def close(self):
        """Wait for the copies, and give back all but the memory, which ends with `arrays`.

        That is the one place where the host waits for the device. What has failed by now has been
        said in a call; at the end of a process the driver may have gone before.
        """
        cdef int mode
        if self.current == NULL or self.pid != getpid():
            return
        if enter(self.current, &mode) == SUCCESS:
            with nogil:
                cu.StreamWaitEvent(self.back, self.fetched[self.blocks - 1], 0)
                cu.StreamSynchronize(self.back)
            leave(mode)
        self._destroy_streams()
        self.fetching = False
        self.kept = []
        self.arrays = []
        self.memory = self.flag_memory = None
        self.flag = NULL
