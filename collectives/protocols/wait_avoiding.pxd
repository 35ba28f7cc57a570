from collectives.protocols.all_ranks cimport (
    AVERAGE, DRAINING, LEAVING, NONE, OUTSIDE, SYNC, AllRanksProtocol)

cdef int IDLE, HELD, RUNNING, SHARED
cdef unsigned long long WORD, GAMMA, MIX_1, MIX_2

cpdef int drawn(unsigned long long seed, unsigned long long version, int size) noexcept nogil

cdef class WaitAvoidingProtocol(AllRanksProtocol):
    cdef public long long next, started, started_ops, running, source
    cdef public int vectors
    cdef public bint timely, waiting, shares
    cdef public unsigned int due, freed_due
    cdef readonly int rank, size
    cdef readonly long long freed
    cdef unsigned long long seed
    cdef unsigned int freed_sent
    cdef long long sent[32]
    cdef long long sent_ops[32]
    cdef long long sync_period
    cdef bint exchanges, passive
    cdef readonly bint own_pace

    cdef void draw(self, int rank, int size, unsigned long long seed) noexcept nogil
    cdef void share(self, bint works) noexcept nogil
    cdef void activate(self, long long version, long long ops, int dimension) noexcept nogil
    cdef void execute(self) noexcept nogil
    cdef bint is_held_back(self) noexcept nogil
    cdef void executed(self, long long version) noexcept nogil
    cdef void reclaim(self, bint running) noexcept nogil
    cdef void note_started(self, long long version) noexcept nogil
    cdef void finished(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef bint may_start(self, long long version) noexcept nogil
    cdef void start(self, long long version) noexcept nogil
    cdef long long awaited(self) noexcept nogil
    cdef void free(self, long long ops, int dimension) noexcept nogil
    cdef void start_awaited(self) noexcept nogil
    cdef void published(self) noexcept nogil
    cdef long long publishes_for(self) noexcept nogil
    cdef long long returned(self) noexcept nogil
    cdef void returns(self) noexcept nogil
    cdef void let_go(self) noexcept nogil
    cdef void abandon(self) noexcept nogil
    cdef bint is_of_all(self, long long version) noexcept nogil
    cdef bint is_synchronous(self) noexcept nogil
