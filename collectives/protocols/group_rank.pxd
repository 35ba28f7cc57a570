from collectives.protocols.contribution cimport NOWHERE, RESULT, SCRATCH, SNAPSHOT, X, Vectors
from collectives.protocols.formed_groups cimport Group, GroupPort, GroupProtocol
from collectives.protocols.rank cimport CONTRIBUTE, END_AVERAGE, RETURN, WAIT, StepsProtocol

cdef class GroupRankPort(GroupPort):
    cdef int requested(self) noexcept nogil
    cdef void finish(self) noexcept nogil
    cdef bint is_under_way(self) noexcept nogil
    cdef long long now(self) noexcept nogil
    cdef bint knows_finite(self) noexcept nogil
    cdef bint is_in_place(self) noexcept nogil
    cdef void changed(self) noexcept nogil

cdef class GroupRankProtocol(StepsProtocol):
    cdef Vectors vectors
    cdef GroupRankPort port
    cdef readonly GroupProtocol forming
    cdef Group record
    cdef readonly Group last
    cdef readonly bint in_call, present, kept, lent, moved, timely, changed
    cdef readonly int source, target
    cdef readonly double weight, total
    cdef readonly long long nonfinite, averages, passive
    cdef bint gives, unreturned

    cdef void attach(self, GroupRankPort port, GroupProtocol forming)
    cdef void begin(self) noexcept nogil
    cdef void contribute(self) noexcept nogil
    cdef void end_average(self, double total, bint timely) noexcept nogil
    cdef void add_moved(self) noexcept nogil
    cdef void note_change(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef void pass_by(self) noexcept nogil
    cdef bint passes_by(self) noexcept nogil
    cdef void begin_call(self, bint present) noexcept nogil
    cdef void end_call(self) noexcept nogil
    cdef void continue_with(self) noexcept nogil
    cdef void go_on_from(self) noexcept nogil
    cdef void interrupt(self) noexcept nogil
    cdef bint is_busy(self) noexcept nogil
    cdef bint has_caught_up(self) noexcept nogil
