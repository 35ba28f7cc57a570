from collectives.exchange.mutex cimport pthread_mutex_t
from collectives.memory.device_kernels cimport DeviceKernels
from collectives.memory.driver cimport Context, Handle

cdef enum:
    # Events in which tickets take turns.
    RING = 64

cdef class DeviceQueue:
    cdef Context context
    cdef DeviceKernels kernels
    cdef Handle stream
    cdef Handle events[RING]
    cdef pthread_mutex_t mutex
    cdef int pid
    # The last ticket, the last that is known to be over, and whether passes have been begun since.
    cdef long long given, passed
    cdef bint pending
    # The first error of the driver, and the function.
    cdef readonly int error
    cdef const char *failed

    cdef bint enter(self, int *mode) noexcept nogil
    cdef bint _enter(self, int *mode) noexcept nogil
    cdef void leave(self, int mode, const char *function, int result) noexcept nogil
    cdef void look_for_errors(self) noexcept nogil
    cdef long long begun(self) noexcept nogil
    cdef bint over(self, long long ticket) noexcept nogil
