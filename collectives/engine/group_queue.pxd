from collectives.engine.integer_messages cimport IntegerMessages
from collectives.protocols.formed_groups cimport GroupProtocol
from collectives.protocols.group_rank cimport GroupRankPort

cdef struct Step:
    # A step: return the application's call, or average a group, in which this rank is the member
    # `me`.
    bint returns
    long long number
    int size, me
    int *members
    double *weights
    Step *next

cdef class GroupQueue(GroupRankPort):
    cdef readonly GroupProtocol protocol
    cdef readonly IntegerMessages messages
    cdef readonly long long progress_count, step_count
    cdef int error
    cdef int rank, size
    # Steps to be executed, in order, and steps that are not in use.
    cdef Step *first
    cdef Step *last
    cdef Step *unused

    cdef bint progress(self) noexcept nogil
    cdef int _allocate_steps(self) except -1
    cdef Step *_add_step(self) noexcept nogil
