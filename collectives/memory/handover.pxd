from collectives.memory.device_kernels cimport DeviceKernels
from collectives.memory.driver cimport Address, Context, Handle, PinnedMemory
from collectives.memory.layout cimport Layout
from collectives.memory.timeline cimport Timeline

cdef enum:
    # The device has not checked whether a vector is finite: the host must check.
    UNKNOWN = -1

cdef class Handover:
    cdef Layout layout
    cdef Context context
    # The context that threads make current to call the driver; NULL once the streams are destroyed.
    cdef Handle current
    cdef int pid
    # The addresses of the application's arrays, their dtypes' `space.CODES`, and its stream.
    cdef Address *device
    cdef char *code
    cdef Handle stream
    # `out`: the stream of the work that precedes a vector's use. Events: the application's stream
    # has made the vector `ready`, `out` has `taken` it, it is `returned` to the application.
    cdef Handle out
    cdef Handle ready
    cdef Handle taken
    cdef Handle returned
    # The points of `out`, and the one at which the vector is checked.
    cdef Timeline timeline
    cdef long long check_point
    # The device's answer to whether the vector is finite is pending. The answer: 1, 0 or UNKNOWN.
    cdef bint unchecked
    cdef readonly int finite
    # The first error of the driver.
    cdef readonly int error
    # The device's kernels, or None and the reason why it has none.
    cdef DeviceKernels kernels
    cdef readonly str why_unchecked
    # Two flags, set to 1 before a kernel runs: whether the vector is finite, and whether the vector
    # given back is bounded.
    cdef PinnedMemory flag_memory
    cdef int *flag
    # The application's arrays that queued work may still read or write.
    cdef list kept

    cdef bint checked(self) noexcept nogil
    cdef bint bounded(self) noexcept nogil
    cdef bint has(self, Py_ssize_t end) noexcept nogil
    cdef bint arrived(self) noexcept nogil
    cdef void return_until(self, Py_ssize_t end) noexcept nogil
    cdef void look_for_errors(self) noexcept nogil
    cdef bint _is_over(self, long long point) noexcept nogil
    cdef int _begin(self) except -1 nogil
    cdef int _mark(self) except -1 nogil
    cdef int _check_finite(self) except -1 nogil
    cdef int _check_bounded(self, Handle stream) except -1 nogil
    cdef int _return(self, Handle stream) except -1 nogil
    cdef int _check_not_capturing(self) except -1
    cdef void _destroy(self) noexcept
