# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A copy in pinned host memory of vectors on a device, which the host averages in their place.

Nothing here waits for the device: copies are queued on streams of their own, which wait for the
application's stream on the device, and it for them. The host asks by queries.
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
from collectives.memory.layout cimport HEADER, Layout

from collectives.errors import CudaError
from collectives.memory.driver import name_of

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef double BETWEEN_QUERIES = 1e-4


cdef class Mirror:
    """One vector's place on the host; `arrays` are its numpy arrays, as of a `Layout`.

    `fetch` copies a vector there, which is complete once `arrived`; what the host then makes of it
    `give_back` copies to the device. The application's stream goes on with that when it is there.

    Args:
        layout: of the vectors.
        addresses: where the arrays of one of them are, which says on which device.

    Raises:
        ValueError: the first is not in a device's memory.
        CudaError: there is no driver, or one of its functions fails.
    """

    def __init__(self, Layout layout, addresses):
        cdef int i
        load()
        self.layout = layout
        self.pid = getpid()
        self.kept = []
        self.host = <char **>calloc(layout.count, sizeof(char *))
        self.device = <Address *>calloc(layout.count, sizeof(Address))
        if self.host == NULL or self.device == NULL:
            raise MemoryError
        self.context = context_of(device_of(addresses[0]))
        self.current = self.context.handle
        self.memory = PinnedMemory(layout.size - HEADER, self.context)
        self.arrays = []
        for i in range(layout.count):
            self.host[i] = self.memory.address + layout.begin[i] - HEADER
            self.arrays.append(numpy.frombuffer(
                self.memory, layout.dtypes[i], layout.length[i], layout.begin[i] - HEADER))
        self._make_streams()

    def _make_streams(self):
        """They wait for no other stream by themselves, and go before others where both could."""
        cdef int lowest, highest, mode
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            check(b"cuCtxGetStreamPriorityRange", cu.CtxGetStreamPriorityRange(&lowest, &highest))
            check(b"cuStreamCreate", cu.StreamCreateWithPriority(&self.out, NON_BLOCKING, highest))
            check(b"cuStreamCreate", cu.StreamCreateWithPriority(&self.back, NON_BLOCKING, highest))
            check(b"cuEventCreate", cu.EventCreate(&self.ready, DISABLE_TIMING))
            check(b"cuEventCreate", cu.EventCreate(&self.fetched, DISABLE_TIMING))
            check(b"cuEventCreate", cu.EventCreate(&self.returned, DISABLE_TIMING))
        finally:
            leave(mode)

    def __dealloc__(self):
        self._destroy_streams()
        free(self.host)
        free(self.device)

    cdef void _destroy_streams(self) noexcept:
        """What is in them still runs. A fork has them, but not the driver."""
        cdef int mode
        if (self.pid == getpid() and self.current != NULL
                and enter(self.current, &mode) == SUCCESS):
            for event in (<size_t>self.ready, <size_t>self.fetched, <size_t>self.returned):
                if event:
                    cu.EventDestroy(<Handle><size_t>event)
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

    def fetch(self, addresses, size_t stream, vector):
        """Begin to copy a vector to the host, as it is when the application's stream gets here.

        Args:
            addresses: where its arrays are.
            stream: the application's: a handle of the driver's, 0 or 1 for the default one.
            vector: what keeps them there.

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
            self.kept.append(vector)
            with nogil:
                self._check_not_capturing()
                self._copy_out()
        finally:
            leave(mode)

    cdef int _check_not_capturing(self) except -1 nogil:
        cdef int status = 0
        cdef int result = cu.StreamIsCapturing(self.stream, &status)
        if result == CAPTURE_IMPLICIT or result == SUCCESS and status != 0:
            with gil:
                raise RuntimeError(
                    "a CUDA graph is being captured on this stream: a graph cannot hold a "
                    "collective, which other ranks take part in; call it between graphs")
        return check(b"cuStreamIsCapturing", result)

    cdef int _copy_out(self) except -1 nogil:
        cdef int i
        check(b"cuEventRecord", cu.EventRecord(self.ready, self.stream))
        check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.ready, 0))
        # What the host gave back last is still read.
        check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.returned, 0))
        for i in range(self.layout.count):
            check(b"cuMemcpyDtoHAsync", cu.MemcpyDtoHAsync(
                self.host[i], self.device[i], self.layout.bytes[i], self.out))
        check(b"cuEventRecord", cu.EventRecord(self.fetched, self.out))
        self.fetching = True
        return 0

    cdef bint arrived(self) noexcept nogil:
        """Whether the vector is on the host; or never will be: see `check`."""
        cdef int result
        cdef int mode
        if not self.fetching or self.error != SUCCESS:
            return True
        result = enter(self.current, &mode)
        if result == SUCCESS:
            result = cu.EventQuery(self.fetched)
            leave(mode)
        if result == NOT_READY:
            return False
        self.error = result
        self.fetching = False
        return True

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
            cu.StreamWaitEvent(self.stream, self.fetched, 0)
            leave(mode)

    def wait(self):
        """Wait until the vector is on the host; others' Python goes on meanwhile."""
        while not self.arrived():
            time.sleep(BETWEEN_QUERIES)
        self.check()

    # To the device

    def give_back(self):
        """Begin to copy what the host has made of it to where it came from.

        What the application puts into its stream from now on comes after that.
        """
        cdef int mode
        self.check()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            with nogil:
                self._copy_back()
        finally:
            leave(mode)
        self.kept = [self.kept.pop()]

    cdef int _copy_back(self) except -1 nogil:
        cdef int i
        for i in range(self.layout.count):
            check(b"cuMemcpyHtoDAsync", cu.MemcpyHtoDAsync(
                self.device[i], self.host[i], self.layout.bytes[i], self.back))
        check(b"cuEventRecord", cu.EventRecord(self.returned, self.back))
        check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.stream, self.returned, 0))
        return 0

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
                cu.StreamWaitEvent(self.back, self.fetched, 0)
                cu.StreamSynchronize(self.back)
            leave(mode)
        self._destroy_streams()
        self.fetching = False
        self.kept = []
        self.arrays = []
        self.memory = None
