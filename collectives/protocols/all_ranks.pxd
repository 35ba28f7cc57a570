cdef int NONE, SYNC, AVERAGE, SYNCHRONIZE, CLOSE, LOAD, JOIN, FINISH, MEET, SAVE
cdef int OUTSIDE, AGREEING, DRAINING, REDUCING, LEAVING

cdef class TreePort:
    cdef void send_failure(self, int dimension, int rank) noexcept nogil
    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil
    cdef void send_free(self, int dimension, long long ops) noexcept nogil
    cdef void send_fin(self, int dimension) noexcept nogil

cdef class AllRanksProtocol:
    cdef TreePort port
    cdef public long long version, base, calls, ops, fin_at
    cdef public int operation, stage, failed, fin_seen
    cdef public bint joined, broken
    cdef public unsigned int notice_due, noticed, fin_due
    cdef readonly int dimensions

    cdef void attach(self, TreePort port)
    cdef unsigned int due_on(self) noexcept nogil
    cdef void send_on(self, int dimension) noexcept nogil
    cdef void run(self) noexcept nogil
    cdef bint is_drained(self) noexcept nogil
    cdef void expect(self, long long version) noexcept nogil
    cdef void hold(self) noexcept nogil
    cdef void release(self) noexcept nogil
    cdef void notice(self, int rank, int dimension) noexcept nogil
    cdef void completed(self) noexcept nogil
    cdef void enter(self, int operation) noexcept nogil
    cdef void agreed(self, long long *records, int size, bint differ=*) noexcept nogil
    cdef void drain(self, long long version) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef void reduced(self) noexcept nogil
    cdef void load(self, long long number) noexcept nogil
    cdef void fin(self, int dimension) noexcept nogil
    cdef bint is_done(self) noexcept nogil
    cdef bint may_leave(self) noexcept nogil
