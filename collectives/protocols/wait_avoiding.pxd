cdef int IDLE, HELD, RUNNING, SHARED
cdef int NONE, SYNC, AVERAGE, SYNCHRONIZE, CLOSE, LOAD, JOIN, FINISH
cdef int OUTSIDE, AGREEING, DRAINING, REDUCING, LEAVING
cdef unsigned long long WORD, GAMMA, MIX_1, MIX_2

cpdef int drawn(unsigned long long seed, unsigned long long version, int size) noexcept nogil

cdef class WaitAvoidingProtocol:
    cdef public long long t, next, told, told_ops, ops, running, source, fin_at, base
    cdef public int vectors, operation, stage, failed, fin_seen
    cdef public bint timely, waiting, joined, broken, shares
    cdef public unsigned int due, notice_due, noticed, freed_due, fin_due
    cdef readonly int rank, size
    cdef readonly long long freed
    cdef unsigned long long seed
    cdef unsigned int freed_sent
    cdef long long sent[32]
    cdef long long sent_ops[32]
    cdef int dimensions
    cdef long long sync_period
    cdef bint exchanges, passive

    cdef void draw(self, int rank, int size, unsigned long long seed) noexcept nogil
    cdef void tell(self, long long version, long long ops, int dimension) noexcept nogil
    cdef void run(self) noexcept nogil
    cdef void execute(self) noexcept nogil
    cdef void executed(self, long long version) noexcept nogil
    cdef void reclaim(self, bint running) noexcept nogil
    cdef void heard(self, long long version) noexcept nogil
    cdef void finished(self) noexcept nogil
    cdef void notice(self, int rank, int dimension) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef bint may_start(self, long long version) noexcept nogil
    cdef void start(self, long long version) noexcept nogil
    cdef long long awaited(self) noexcept nogil
    cdef void free(self, long long ops, int dimension) noexcept nogil
    cdef void start_awaited(self) noexcept nogil
    cdef void published(self) noexcept nogil
    cdef void returns(self) noexcept nogil
    cdef void release(self) noexcept nogil
    cdef void hold(self) noexcept nogil
    cdef void abandon(self) noexcept nogil
    cdef bint is_synchronous(self) noexcept nogil
    cdef void enter(self, int operation) noexcept nogil
    cdef void agreed(self, long long *records, int size) noexcept nogil
    cdef void drain(self, long long t) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef void reduced(self) noexcept nogil
    cdef void fin(self, int dimension) noexcept nogil
    cdef bint may_leave(self) noexcept nogil
