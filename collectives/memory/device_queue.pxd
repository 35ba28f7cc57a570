from collectives.exchange.mutex cimport pthread_mutex_t
from collectives.memory.device_kernels cimport DeviceKernels
from collectives.memory.driver cimport Context, Handle

cdef enum:
    # Events that tickets use in turn.
    RING = 64

cdef class DeviceQueue:
    cdef Context context
    cdef DeviceKernels kernels
    cdef Handle stream
    cdef Handle events[RING]
    cdef pthread_mutex_t mutex
    cdef int pid
    # The last ticket, the last one known to be complete, and whether a pass was begun after the
    # last ticket.
    cdef long long given, passed
    cdef bint pending
    # The driver's error, and the function that returned it.
    cdef readonly int error
    cdef const char *failed

    cdef bint enter(self, int *mode) noexcept nogil
    cdef bint _enter(self, int *mode) noexcept nogil
    cdef void leave(self, int mode, const char *function, int result) noexcept nogil
    cdef void look_for_errors(self) noexcept nogil
    cdef long long begun(self) noexcept nogil
    cdef bint over(self, long long ticket) noexcept nogil
