"""A queue of a device's passes over vectors in its memory, with tickets for their completion."""

from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport (
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.device_kernels cimport kernels_of
from collectives.memory.driver cimport (
    NOT_READY,
    SUCCESS,
    check,
    context_of,
    create_stream,
    cu,
    enter,
    leave,
    load,
)
from collectives.memory.timeline cimport Timeline

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef enum:
    # Nanoseconds without a new ticket after which a thread that waits for one looks for an error.
    SECOND = 1000000000


cdef class DeviceQueue:
    """A stream of a device that does not synchronize with others by itself.

    Any thread may begin passes, between `enter` and `leave`; only `close` waits for the device. A
    ticket is a point of the stream behind all passes so far: see `Timeline`. After an error of the
    driver, passes are skipped and all tickets are over, so that no caller waits forever; a caller
    that has waited must look at `error` or call `check`.

    Args:
        device: the device's number.

    Raises:
        CudaError: there is no driver, or no NVRTC, or one of their functions fails.
    """

    def __init__(self, int device):
        cdef int mode
        pthread_mutex_init(&self.mutex, NULL)
        load()
        self.pid = getpid()
        self.context = context_of(device)
        self.kernels = kernels_of(self.context)
        check(b"cuCtxPushCurrent", enter(self.context.handle, &mode))
        try:
            create_stream(&self.stream)
        finally:
            leave(mode)
        self.timeline = Timeline(self.context)

    def __dealloc__(self):
        self.close()

    @property
    def handle(self):
        """The driver's handle of the stream."""
        return <size_t>self.stream

    cdef bint enter(self, int *mode) noexcept nogil:
        """Return whether a pass can be begun; if so, the device's context is current."""
        if not self._enter(mode):
            return False
        self.pending = True
        return True

    cdef bint _enter(self, int *mode) noexcept nogil:
        cdef int result
        pthread_mutex_lock(&self.mutex)
        if self.error == SUCCESS:
            result = enter(self.context.handle, mode)
            if result == SUCCESS:
                return True
            self.error, self.failed = result, b"cuCtxPushCurrent"
        pthread_mutex_unlock(&self.mutex)
        return False

    cdef void leave(self, int mode, const char *function, int result) noexcept nogil:
        """Undo `enter`, and record the driver's `function` and its `result` if that is an error."""
        if result != SUCCESS and result != NOT_READY:
            self.error, self.failed = result, function
        leave(mode)
        pthread_mutex_unlock(&self.mutex)

    cdef long long begun(self) noexcept nogil:
        """Return a ticket for all passes begun so far.

        If there has been none since the last ticket, this calls no function of the driver.
        """
        cdef int mode
        cdef int result
        cdef bint pending
        pthread_mutex_lock(&self.mutex)
        pending = self.pending
        pthread_mutex_unlock(&self.mutex)
        if pending and self._enter(&mode):
            result = SUCCESS
            if self.pending:
                self.pending = False
                self.looked = now()
                result = self.timeline.mark(self.stream)
            self.leave(mode, b"cuStreamWriteValue32", result)
        return self.timeline.last

    cdef bint over(self, long long ticket) noexcept nogil:
        """Return whether all passes before a ticket are complete, or the driver has failed."""
        if self.timeline.reached(ticket) or self.error != SUCCESS:
            return True
        if now() - self.looked > SECOND:
            self.look_for_errors()
        return self.error != SUCCESS

    cdef void look_for_errors(self) noexcept nogil:
        """Query the device so that `error` is set if it has failed, for whatever reason."""
        cdef int mode
        self.looked = now()
        if self._enter(&mode):
            self.leave(mode, b"cuStreamQuery", cu.StreamQuery(self.stream))

    def check(self):
        """Raise CudaError if a function of the driver has failed."""
        if self.error != SUCCESS:
            check(self.failed, self.error)

    def close(self):
        """Wait for all passes and free the stream; a forked child cannot use the driver."""
        cdef int mode
        if (self.stream != NULL and self.pid == getpid()
                and enter(self.context.handle, &mode) == SUCCESS):
            with nogil:
                cu.StreamSynchronize(self.stream)
            cu.StreamDestroy(self.stream)
            leave(mode)
        self.stream = NULL
