from mpi4py.MPI cimport Comm

from collectives.engine.inquiry cimport Inquiry
from collectives.engine.waiting cimport Waiter, Waiting
from collectives.protocols.all_ranks cimport AllRanksProtocol

cdef class StallReporter(Waiter):
    cdef AllRanksProtocol protocol
    cdef Comm control, data
    cdef Inquiry inquiry
    # Nanoseconds without progress after which a caller reports a stall and ends the job; 0: never.
    cdef long long stall, abort
    # Identifies the collective, the same on all ranks; which thread called last.
    cdef long long identity
    cdef unsigned long caller
    # The application is in close(). What all ranks do by several operations; NONE: by just one.
    cdef bint closing
    cdef int purpose
    # What each missing rank did at the last report.
    cdef dict said

    cdef long long _calls_made(self) noexcept nogil
    cdef void _describe_call(self, long long *answer) noexcept nogil
    cdef _why_missing_in_call(self, long long *answer, operation, elsewhere)
    cdef void _answer(self) noexcept nogil
    cdef void _ask(self) noexcept nogil
    cdef bint _is_joining(self) noexcept nogil
    cdef int _say(self, Waiting *waiting, long long time) except -1
    cdef int _look_for_circle(self) except -1
    cdef _why_missing(self, int rank)
    cdef int _abort(self, long long waited) except -1
