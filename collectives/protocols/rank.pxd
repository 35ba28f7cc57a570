cimport cython

from collectives.protocols.all_ranks cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    JOIN,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    REDUCING,
    SYNC,
    AllRanksProtocol,
)
from collectives.protocols.contribution cimport ContributionProtocol, SnapshotProtocol
from collectives.protocols.wait_avoiding cimport HELD, IDLE, RUNNING, SHARED, WaitAvoidingProtocol

cdef int WAIT, CONTRIBUTE, END_AVERAGE, ADOPT, REPLACE, END
cdef int BEGIN_VERSION, END_VERSION, PUBLISH, RETURN, SHARE

cdef class RankPort:
    cdef void begin_pass(self, int step, bint moves) noexcept nogil
    cdef bint end_pass(self, int step, bint moves) noexcept nogil
    cdef bint is_here(self) noexcept nogil
    cdef bint knows_change(self) noexcept nogil
    cdef void remember(self) noexcept nogil
    cdef void begin_average(self, long long number) noexcept nogil
    cdef bint is_exchanged(self) noexcept nogil
    cdef double total_weight(self) noexcept nogil
    cdef void number_from(self, long long first, long long shift) noexcept nogil
    cdef void adopt(self) noexcept nogil
    cdef void redirect(self) noexcept nogil
    cdef void returns(self, bint in_group) noexcept nogil
    cdef void begin_version(self, long long version, long long number) noexcept nogil
    cdef void executed(self, long long version) noexcept nogil
    cdef void find_group(self, long long version) noexcept nogil
    cdef bint is_quiet(self) noexcept nogil
    cdef void open(self, long long number) noexcept nogil
    cdef long long close(self) noexcept nogil
    cdef bint has_begun(self) noexcept nogil
    cdef long long reached(self) noexcept nogil
    cdef double closed_weight(self) noexcept nogil
    cdef bint replaced(self) noexcept nogil
    cdef void resume(self) noexcept nogil
    cdef bint needs_messages(self, long long number) noexcept nogil
    cdef bint leaves_to_others(self) noexcept nogil
    cdef bint help(self, long long number) noexcept nogil

cdef class RankProtocol:
    cdef RankPort port
    cdef AllRanksProtocol ranks
    cdef ContributionProtocol contribution
    cdef readonly bint begun, in_group
    cdef public bint gathers, done
    cdef readonly int passing
    cdef public int disagreed
    cdef public long long called, timely
    cdef readonly long long synchronizations
    cdef readonly double weight
    cdef readonly long long data_ops
    cdef long long loading

    cdef void attach(self, RankPort port)
    cdef int advance(self) noexcept nogil
    cdef int next_step(self) noexcept nogil
    cdef bint may_contribute(self) noexcept nogil
    cdef void take(self, int step) noexcept nogil
    cdef void make_pass(self, int step) noexcept nogil
    cdef bint moves(self, int step) noexcept nogil
    cdef void read_or_write(self, int step) noexcept nogil
    cdef void passed(self) noexcept nogil
    cdef void go_on(self, int step) noexcept nogil
    cdef void enter(self, int operation) noexcept nogil
    cdef void agreed(
        self, long long *records, int size, long long loading, bint differ, bint failed
    ) noexcept nogil
    cdef void begin_average(self) noexcept nogil
    cdef long long number_of_average(self) noexcept nogil
    cdef void end_average(self) noexcept nogil
    cdef void end_operation(self) noexcept nogil
    cdef void count_data(self) noexcept nogil
    cdef void renumber(self) noexcept nogil
    cdef bint is_busy(self) noexcept nogil
    cdef bint has_caught_up(self) noexcept nogil
    cdef void interrupt(self) noexcept nogil
    cdef void interrupted(self, bint ended) noexcept nogil

@cython.final
cdef class VersionsProtocol(RankProtocol):
    cdef WaitAvoidingProtocol versions
    cdef SnapshotProtocol publishing
    cdef readonly bint holding, joining, opened
    cdef readonly long long source
    cdef long long opened_for

    cdef void begin(self, bint shares) noexcept nogil
    cdef void begin_version(self) noexcept nogil
    cdef void end_version(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef void end_call(self) noexcept nogil
    cdef void publish(self) noexcept nogil
    cdef void join(self) noexcept nogil
    cdef void hold(self, bint joins) noexcept nogil
    cdef void let_go(self) noexcept nogil
    cdef void end_sharing(self) noexcept nogil
    cdef void open(self) noexcept nogil
    cdef void reclaim(self) noexcept nogil
    cdef void note_executed(self, long long end) noexcept nogil
    cdef bint serve_opened(self) noexcept nogil
    cdef bint is_started(self, long long version) noexcept nogil
    cdef long long next_version(self) noexcept nogil
    cdef bint is_open(self) noexcept nogil
    cdef bint is_behind(self) noexcept nogil
