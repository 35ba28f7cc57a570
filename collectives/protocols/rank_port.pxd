cdef class StepPort:
    cdef void begin_pass(self, int step, bint moves) noexcept nogil
    cdef bint end_pass(self, int step, bint moves) noexcept nogil
    cdef bint is_here(self) noexcept nogil
    cdef void begin_average(self, long long number) noexcept nogil
    cdef bint is_exchanged(self) noexcept nogil
    cdef double total_weight(self) noexcept nogil
    cdef void adopt(self) noexcept nogil
    cdef void redirect(self) noexcept nogil
    cdef void returns(self, bint in_group) noexcept nogil
    cdef void executed(self, long long number) noexcept nogil

cdef class RankPort(StepPort):
    cdef bint knows_change(self) noexcept nogil
    cdef void remember(self) noexcept nogil
    cdef double mean_count(self) noexcept nogil
    cdef void number_from(self, long long first, long long shift) noexcept nogil
    cdef void begin_version(self, long long version, long long number) noexcept nogil
    cdef void find_group(self, long long version) noexcept nogil
    cdef bint is_quiet(self) noexcept nogil
    cdef void open(self, long long number) noexcept nogil
    cdef long long close(self) noexcept nogil
    cdef bint has_begun(self) noexcept nogil
    cdef long long reached(self) noexcept nogil
    cdef double closed_weight(self) noexcept nogil
    cdef double closed_count(self) noexcept nogil
    cdef long long closed_average(self) noexcept nogil
    cdef double closed_average_count(self) noexcept nogil
    cdef bint replaced(self) noexcept nogil
    cdef void resume(self) noexcept nogil
    cdef bint needs_messages(self, long long number) noexcept nogil
    cdef bint leaves_to_others(self) noexcept nogil
    cdef bint help(self, long long number) noexcept nogil
