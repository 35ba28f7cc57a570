from collectives.memory.device_queue cimport DeviceQueue
from collectives.memory.space cimport Space

cdef class DeviceSpace(Space):
    cdef DeviceQueue queue
    # The `CODES` of the arrays' dtypes, and of the dtypes sent in their place.
    cdef bytes kept_codes
    cdef const char *dtypes
    cdef const char *wires
    # The flag of passes that return a value.
    cdef int *flag

    cdef bint _answer(self) noexcept nogil
