from libc.math cimport exp

from collectives.protocols.all_ranks cimport AVERAGE, FINISH, SYNC, SYNCHRONIZE, AllRanksProtocol

cdef int NOWHERE, X, SNAPSHOT, RESULT, SCRATCH, KEPT
cdef int GIVEN, WORK, CONTRACTION
cdef double LARGEST_EXPONENT

cdef class Vectors:
    cdef void copy(self, int to, int source) noexcept nogil
    cdef void zero(self, int vector) noexcept nogil
    cdef bint all_finite(self, int vector) noexcept nogil
    cdef bint is_change_finite(self) noexcept nogil
    cdef void add_change(self, int to) noexcept nogil
    cdef bint take_change(self) noexcept nogil
    cdef void absorb(self, double own, double total) noexcept nogil
    cdef void keep_part(self) noexcept nogil
    cdef void take_out_part(self) noexcept nogil
    cdef void put_back_part(self) noexcept nogil

cdef class ContributionProtocol:
    cdef Vectors vectors
    cdef AllRanksProtocol operations
    cdef readonly bint present, finite, lent, weightless
    cdef readonly double given_weight, published_weight, weight, total
    cdef readonly long long nonfinite
    cdef readonly int source, target, copy, saved
    cdef readonly double work
    cdef bint gives, gives_x, contributed
    cdef int weighing
    cdef double log_rate, most_work

    cdef void weigh_by(self, int weighing, double log_rate, double most_work) noexcept nogil
    cdef double worked(self, double weight) noexcept nogil
    cdef double weight_of_work(self) noexcept nogil
    cdef void restart_work(self) noexcept nogil
    cdef void give(self, double weight) noexcept nogil
    cdef void forget(self) noexcept nogil
    cdef void load(self) noexcept nogil
    cdef void save(self) noexcept nogil
    cdef void leave_out(self) noexcept nogil
    cdef bint publishes(self) noexcept nogil
    cdef bint is_finishing(self) noexcept nogil
    cdef bint is_averaging(self) noexcept nogil
    cdef bint takes_pass(self) noexcept nogil
    cdef bint adds_change(self) noexcept nogil
    cdef void begin_average(self) noexcept nogil
    cdef void contribute(self, bint publishes) noexcept nogil
    cdef void aim_average(self) noexcept nogil
    cdef void begin_again(self) noexcept nogil
    cdef void end_exchange(self, double total) noexcept nogil
    cdef void end_average(self) noexcept nogil
    cdef void end_operation(self, bint averages) noexcept nogil
    cdef void interrupt(self, bint begun) noexcept nogil
    cdef void contribute_ahead(self) noexcept nogil
    cdef void stop_lending(self, bint begun) noexcept nogil
    cdef int own_target(self) noexcept nogil
    cdef void interrupted(self, bint ended) noexcept nogil
