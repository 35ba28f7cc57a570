from collectives.memory.device_queue cimport DeviceQueue
from collectives.memory.space cimport Space

cdef class DeviceSpace(Space):
    cdef DeviceQueue queue
    # The dtypes of the arrays, and of what travels for them, as `CODES` has them.
    cdef bytes kept_codes
    cdef const char *dtypes
    cdef const char *wires
    # For passes that return something.
    cdef int *flag

    cdef bint _answer(self) noexcept nogil
