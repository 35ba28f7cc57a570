cdef int IDLE, HELD, RUNNING
cdef int NONE, SYNC, AVERAGE, SYNCHRONIZE, CLOSE
cdef int OUTSIDE, AGREEING, MOVING, LEAVING

cdef class WaitAvoiding:
    cdef public long long t, next, told, told_ops, ops, running, source, fin_at
    cdef public int vectors, operation, stage
    cdef public bint timely, waiting, broken
    cdef public unsigned int due, fin_due, fin_seen
    cdef long long sent[32]
    cdef long long sent_ops[32]
    cdef int dimensions
    cdef long long sync_period
    cdef bint exchanges, passive

    cdef void tell(self, long long version, long long ops, int dimension) noexcept nogil
    cdef void run(self) noexcept nogil
    cdef void finished(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef void published(self) noexcept nogil
    cdef void returns(self) noexcept nogil
    cdef void release(self) noexcept nogil
    cdef void hold(self) noexcept nogil
    cdef void abandon(self) noexcept nogil
    cdef bint is_synchronous(self) noexcept nogil
    cdef void enter(self, int operation) noexcept nogil
    cdef void agreed(self, long long *records, int size) noexcept nogil
    cdef void moved(self) noexcept nogil
    cdef void fin(self, int dimension) noexcept nogil
    cdef bint may_leave(self) noexcept nogil
