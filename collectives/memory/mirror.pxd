from collectives.memory.driver cimport Address, Context, Handle, PinnedMemory
from collectives.memory.layout cimport Layout

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
    # What the application's stream had come to; a vector is on the host; it is on the device.
    cdef Handle ready
    cdef Handle fetched
    cdef Handle returned
    # A vector is on its way to the host.
    cdef bint fetching
    # The first error of a query.
    cdef readonly int error
    # The application's arrays that copies may still be under way from and to.
    cdef list kept

    cdef bint arrived(self) noexcept nogil
    cdef void _destroy_streams(self) noexcept
    cdef int _copy_out(self) except -1 nogil
    cdef int _copy_back(self) except -1 nogil
    cdef int _check_not_capturing(self) except -1 nogil
