from collectives.memory.device_kernels cimport DeviceKernels
from collectives.memory.driver cimport Address, Context, Handle, PinnedMemory
from collectives.memory.layout cimport Layout

cdef enum:
    # The device has not been asked whether a vector is finite: the host is to see for itself.
    UNKNOWN = -1

cdef class Handover:
    cdef Layout layout
    cdef Context context
    # What threads that call the driver have for a context; NULL once there are no streams.
    cdef Handle current
    cdef int pid
    # Where the application's arrays are, their dtypes as `space.CODES` has them, its stream.
    cdef Address *device
    cdef char *code
    cdef Handle stream
    # What is put before a vector is used; what the application's stream had come to, a vector is
    # checked, and is the application's again.
    cdef Handle out
    cdef Handle ready
    cdef Handle was_checked
    cdef Handle returned
    # The device has not yet said whether the vector is finite. Whether it is: 1, 0 or UNKNOWN.
    cdef bint unchecked
    cdef readonly int finite
    # The first error of a query.
    cdef readonly int error
    # The device's kernels, or None and why it has none.
    cdef DeviceKernels kernels
    cdef readonly str why_unchecked
    # Two, which are 1 before a kernel uses them: whether the vector is finite, and whether what was
    # given back is bounded.
    cdef PinnedMemory flag_memory
    cdef int *flag
    # The application's arrays that something may still be under way from and to.
    cdef list kept

    cdef bint checked(self) noexcept nogil
    cdef bint bounded(self) noexcept nogil
    cdef bint has(self, Py_ssize_t end) noexcept nogil
    cdef bint arrived(self) noexcept nogil
    cdef void return_until(self, Py_ssize_t end) noexcept nogil
    cdef bint _is_over(self, Handle event) noexcept nogil
    cdef int _begin(self) except -1 nogil
    cdef int _check_finite(self) except -1 nogil
    cdef int _check_bounded(self, Handle stream) except -1 nogil
    cdef int _return(self, Handle stream) except -1 nogil
    cdef int _check_not_capturing(self) except -1
    cdef void _destroy(self) noexcept
