from collectives.exchange.mutex cimport pthread_mutex_t
from collectives.memory.device_kernels cimport DeviceKernels
from collectives.memory.driver cimport Context, Handle
from collectives.memory.timeline cimport Timeline

cdef class DeviceQueue:
    cdef Context context
    cdef DeviceKernels kernels
    cdef Handle stream
    cdef Timeline timeline
    cdef pthread_mutex_t mutex
    cdef int pid
    # Whether a pass was begun after the last ticket; when a ticket was given or the device queried.
    cdef bint pending
    cdef long long looked
    # The driver's error, and the function that returned it.
    cdef readonly int error
    cdef const char *failed

    cdef bint enter(self, int *mode) noexcept nogil
    cdef bint _enter(self, int *mode) noexcept nogil
    cdef void leave(self, int mode, const char *function, int result) noexcept nogil
    cdef void look_for_errors(self) noexcept nogil
    cdef long long begun(self) noexcept nogil
    cdef bint over(self, long long ticket) noexcept nogil
