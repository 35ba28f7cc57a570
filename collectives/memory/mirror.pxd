from collectives.memory.device_kernels cimport DeviceKernels
from collectives.memory.driver cimport Address, Context, Handle, PinnedMemory
from collectives.memory.layout cimport Layout

cdef enum:
    # The device has not been asked whether a vector is finite: the host is to see for itself.
    UNKNOWN = -1

cdef class Mirror:
    cdef Layout layout
    cdef Context context
    cdef PinnedMemory memory
    # What threads that call the driver have for a context; NULL once there are no streams.
    cdef Handle current
    cdef int pid
    # The host's arrays, where they begin, and the device's.
    cdef readonly list arrays
    cdef char **host
    cdef Address *device
    # What copies to the host and to the device are in; the application's.
    cdef Handle out
    cdef Handle back
    cdef Handle stream
    # What the application's stream had come to; a vector is checked; each of its blocks is on the
    # host; all of it is on the device again.
    cdef Handle ready
    cdef Handle was_checked
    cdef Handle *fetched
    cdef Handle returned
    # Blocks: their bytes, and how many there are; how many of a vector's are known to be here, and
    # how far it has been given back, in the bytes of a vector.
    cdef Py_ssize_t block
    cdef int blocks, here
    cdef Py_ssize_t given_back
    # A vector is on its way to the host; the device has not yet said whether it is finite.
    cdef bint fetching, unchecked
    # Whether it is, as the device says it: 1, 0 or UNKNOWN.
    cdef readonly int finite
    # The device's kernels, or None and why it has none; what they call the arrays' dtypes.
    cdef DeviceKernels kernels
    cdef readonly str why_unchecked
    cdef char *code
    cdef PinnedMemory flag_memory
    cdef int *flag
    # The first error of a query.
    cdef readonly int error
    # The application's arrays that copies may still be under way from and to.
    cdef list kept

    cdef bint checked(self) noexcept nogil
    cdef bint has(self, Py_ssize_t end) noexcept nogil
    cdef bint arrived(self) noexcept nogil
    cdef void return_until(self, Py_ssize_t end) noexcept nogil
    cdef bint _is_over(self, Handle event) noexcept nogil
    cdef void _destroy_streams(self) noexcept
    cdef int _copy_out(self) except -1 nogil
    cdef int _copy_block(self, Py_ssize_t low, Py_ssize_t high) except -1 nogil
    cdef int _check_finite(self) except -1 nogil
    cdef int _copy_back(self, Py_ssize_t end) noexcept nogil
    cdef int _check_not_capturing(self) except -1
