"""Hands a vector on a device over to the engine and back to the application.

Either the host averages a copy in pinned memory (`Mirror`), or the device averages the vector
itself (`InPlace`). Only `wait` and `close` wait for the device: all work is queued on the engine's
own streams. These wait for the application's stream, and it waits for them, on the device. The host
reads their progress in pinned memory (`Timeline`).

The functions without the GIL that the progress thread calls, `checked`, `has`, `arrived`, `bounded`
and `return_until`, call no function of the driver: one that blocks would delay other ranks.
"""

import time

from libc.stdlib cimport free

from collectives.exchange.clock cimport now
from collectives.memory.allocation cimport zeroed
from collectives.memory.device_kernels cimport kernels_of
from collectives.memory.driver cimport (
    CAPTURE_IMPLICIT,
    NOT_READY,
    SUCCESS,
    Address,
    Handle,
    PinnedMemory,
    check,
    context_of,
    create_event,
    create_stream,
    cu,
    device_of,
    enter,
    leave,
    load,
)
from collectives.memory.layout cimport Layout
from collectives.memory.timeline cimport Timeline

from collectives.errors import CudaError
from collectives.memory.driver import name_of
from collectives.memory.space import CODES

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef double BETWEEN_QUERIES = 1e-4


cdef class Handover:
    """Hands vectors of one layout over to the engine and back, one after the other.

    `point_to` sets a vector's addresses, and `fetch` hands it to the engine, which may begin once
    the vector is `checked`, and use it as far as `has` allows. `give_back` returns it to the
    application, or `withdraw` if it has not been used.

    Args:
        layout: the vectors' layout.
        addresses: the addresses of one vector's arrays, which determine the device.

    Attributes:
        why_unchecked: why the device cannot check whether vectors are finite, so that the host
            checks each vector that has arrived; None: the device checks.

    Raises:
        ValueError: the first address is not in a device's memory.
        CudaError: there is no driver, or one of its functions fails.
    """

    def __init__(self, Layout layout, addresses):
        cdef int i, mode
        load()
        self.layout = layout
        self.pid = getpid()
        self.kept = []
        self.finite = UNKNOWN
        self.device = <Address *>zeroed(layout.count, sizeof(Address))
        self.code = <char *>zeroed(layout.count, sizeof(char))
        if self.device == NULL or self.code == NULL:
            raise MemoryError
        for i in range(layout.count):
            self.code[i] = ord(CODES[layout.dtypes[i]])
        self.context = context_of(device_of(addresses[0]))
        self.current = self.context.handle
        self._load_kernels()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            create_stream(&self.out)
            create_event(&self.ready)
            create_event(&self.taken)
            create_event(&self.returned)
        finally:
            leave(mode)
        self.timeline = Timeline(self.context)

    def _load_kernels(self):
        try:
            self.kernels = kernels_of(self.context)
        except CudaError as error:
            self.why_unchecked = str(error)
            return
        self.flag_memory = PinnedMemory(2 * sizeof(int), self.context)
        self.flag = <int *>self.flag_memory.address
        self.flag[0] = 1

    def __dealloc__(self):
        Handover._destroy(self)
        free(self.device)
        free(self.code)

    cdef void _destroy(self) noexcept:
        """Destroy the streams; their work still runs. A forked child cannot use the driver."""
        cdef int mode
        if (self.pid == getpid() and self.current != NULL
                and enter(self.current, &mode) == SUCCESS):
            for event in (<size_t>self.ready, <size_t>self.taken, <size_t>self.returned):
                if event:
                    cu.EventDestroy(<Handle><size_t>event)
            if self.out != NULL:
                cu.StreamDestroy(self.out)
            leave(mode)
        self.current = NULL

    @property
    def ordinal(self):
        """The device's number."""
        return self.context.device

    # From the application

    def point_to(self, addresses, size_t stream):
        """Set the current vector; the previous one has arrived.

        Args:
            addresses: the addresses of its arrays.
            stream: the application's stream: a driver handle, 0 or 1 for the default stream.

        Raises:
            TypeError, ValueError: they are on another device than the first vector, or on none.
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
        """Begin to take the vector, as it is when the application's stream reaches this point.

        Args:
            vector: the object that owns its memory.

        Raises:
            CudaError: a function of the driver fails.
        """
        cdef int mode
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            self.kept.append(vector)
            with nogil:
                check(b"cuEventRecord", cu.EventRecord(self.ready, self.stream))
                check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.ready, 0))
                self._begin()
                check(b"cuEventRecord", cu.EventRecord(self.taken, self.out))
        finally:
            leave(mode)

    cdef int _begin(self) except -1 nogil:
        """Queue the work that precedes the vector's use, behind the application's stream."""
        return 0

    cdef int _check_finite(self) except -1 nogil:
        """Queue the device's check whether the vector is finite."""
        cdef int i
        self.checked()  # discards the answer for a vector that was withdrawn
        for i in range(self.layout.count):
            check(b"cuLaunchKernel", self.kernels.all_finite(
                self.code[i], self.flag, self.device[i], self.layout.length[i], self.out))
        self._mark()
        self.check_point = self.timeline.last
        self.unchecked = True
        return 0

    cdef int _mark(self) except -1 nogil:
        """Queue the next point of `out`."""
        return check(b"cuStreamWriteValue32", self.timeline.mark(self.out))

    cdef int _check_bounded(self, Handle stream) except -1 nogil:
        """Queue the device's check whether the vector given back is bounded."""
        cdef int i
        self.flag[1] = 1
        for i in range(self.layout.count):
            check(b"cuLaunchKernel", self.kernels.all_bounded(
                self.code[i], &self.flag[1], self.device[i], self.layout.length[i], stream))
        return 0

    cdef bint _is_over(self, long long point) noexcept nogil:
        """Return whether `out` has reached a point, or never will: see `check`."""
        return self.error != SUCCESS or self.timeline.reached(point)

    cdef void look_for_errors(self) noexcept nogil:
        """Ask the driver whether the device has failed, so that `check` raises; it may block."""
        cdef int mode, result
        if (self.error != SUCCESS or self.current == NULL
                or self.timeline.reached(self.timeline.last)):
            return
        result = enter(self.current, &mode)
        if result == SUCCESS:
            result = cu.StreamQuery(self.out)
            leave(mode)
        if result != NOT_READY:
            self.error = result

    cdef bint checked(self) noexcept nogil:
        """Return whether `finite` is final for the vector fetched, or never will be."""
        if self.flag == NULL:
            return self.arrived()
        if self.unchecked:
            if not self._is_over(self.check_point):
                return False
            self.unchecked = False
            if self.error == SUCCESS:
                self.finite = self.flag[0]
                # Now, because later the device may be writing the other flag.
                self.flag[0] = 1
        return True

    cdef bint bounded(self) noexcept nogil:
        """Return whether x, last given back with `bounds`, keeps x + (y − x) finite for finite y.

        Valid once the next vector is `checked`.
        """
        return self.flag != NULL and self.flag[1]

    cdef bint has(self, Py_ssize_t end) noexcept nogil:
        """Return whether the vector can be used up to this byte, or never will be: see `check`."""
        return not self.unchecked or self.checked()

    cdef bint arrived(self) noexcept nogil:
        """Return whether all of the vector can be used, or never will be: see `check`."""
        return self.has(self.layout.size)

    def check(self):
        """Raise CudaError if the vector will never arrive."""
        if self.error != SUCCESS:
            raise CudaError(f"cuStreamQuery returned {name_of(self.error)}")

    def wait(self):
        """Wait until the vector can be used; other Python threads run meanwhile."""
        while not self.arrived():
            time.sleep(BETWEEN_QUERIES)
            with nogil:
                self.look_for_errors()
        self.check()

    def withdraw(self):
        """Return the fetched vector unused: the application's stream continues after its fetch.

        The next call raises an error of the driver.
        """

    # Back to the application

    def return_in_blocks(self):
        """Let `return_until` return a vector, rather than `give_back` all of it."""

    cdef void return_until(self, Py_ssize_t end) noexcept nogil:
        """Let the vector be returned up to this byte: it is final there."""

    def give_back(self, bint bounds=False):
        """Return the vector to the application: its stream's later work waits for the engine's.

        Args:
            bounds: whether the device is to check if the vector is `bounded`.

        Raises:
            CudaError: a function of the driver fails, or has failed.
        """

    cdef int _return(self, Handle stream) except -1 nogil:
        """Make the application's stream wait for what is queued on this stream."""
        check(b"cuEventRecord", cu.EventRecord(self.returned, stream))
        return check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.stream, self.returned, 0))

    def forget(self):
        """Release the application's arrays, which have not changed, instead of `give_back`."""
        self.kept.clear()

    def close(self):
        """Wait until the device has finished with the vectors; release all but memory in use."""
        self._destroy()
        self.unchecked = False
        self.timeline = None
        self.kept = []
        self.flag_memory = None
        self.flag = NULL
