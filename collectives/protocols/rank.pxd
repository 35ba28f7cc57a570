from collectives.protocols.all_ranks cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    REDUCING,
    SAVE,
    SYNC,
    AllRanksProtocol,
)
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.rank_port cimport RankPort, StepPort

cdef int WAIT, CONTRIBUTE, END_AVERAGE, ADOPT, REPLACE, END, RETURN, STORE

cdef class StepsProtocol:
    cdef StepPort executing
    cdef readonly bint begun
    cdef readonly int passing
    cdef public bint done

    cdef int advance(self) noexcept nogil
    cdef int next_step(self) noexcept nogil
    cdef void take(self, int step) noexcept nogil
    cdef void make_pass(self, int step) noexcept nogil
    cdef bint moves(self, int step) noexcept nogil
    cdef void read_or_write(self, int step) noexcept nogil
    cdef void passed(self) noexcept nogil
    cdef void go_on(self, int step) noexcept nogil

cdef class RankProtocol(StepsProtocol):
    cdef RankPort port
    cdef AllRanksProtocol operations
    cdef ContributionProtocol contribution
    cdef readonly bint in_group
    cdef public bint gathers
    cdef public int disagreed
    cdef public long long called, timely
    cdef readonly long long synchronizations
    cdef readonly double weight
    cdef readonly long long data_ops
    cdef long long loading

    cdef void attach(self, RankPort port)
    cdef bint may_contribute(self) noexcept nogil
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
