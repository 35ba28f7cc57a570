from collectives.engine.snapshots cimport Snapshots

cdef class GroupVersions(Snapshots):
    cdef int window
    # The application is in publish().
    cdef bint holding
    # The group whose mean the last call returned, and the version of that mean.
    cdef int *taken
    cdef long long taken_source

    cdef void _begin_version(self) noexcept nogil
    cdef void _finish_version(self) noexcept nogil
    cdef void _begin_call(self) noexcept nogil
    cdef void _lend(self) noexcept nogil
    cdef void _complete_call(self) noexcept nogil
    cdef int _publish_between_calls(self) except -1 nogil
    cdef int _join(self) except -1 nogil
    cdef int _drawn(self)
