from collectives.memory.driver cimport Context, Handle, PinnedMemory

cdef class Timeline:
    cdef PinnedMemory memory
    cdef unsigned *number
    # The last point queued, and whether the driver supports `StreamWriteValue32`.
    cdef readonly long long last
    cdef bint writes

    cdef int mark(self, Handle stream) noexcept nogil
    cdef bint reached(self, long long point) noexcept nogil
