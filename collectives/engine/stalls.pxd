from mpi4py.MPI cimport Comm

from collectives.engine.inquiry cimport Inquiry
from collectives.engine.served cimport Served, Waiting
from collectives.protocols.all_ranks cimport AllRanksProtocol

cdef class StallReporter:
    cdef int rank, size
    # The collective's, set once that is made.
    cdef AllRanksProtocol protocol
    cdef Comm control
    cdef Inquiry inquiry
    # Nanoseconds without progress after which a caller reports a stall and ends the job; 0: never.
    cdef long long stall, abort
    # Identifies the collective, the same on all ranks; which thread called last.
    cdef long long identity
    cdef unsigned long caller
    # The application is in close(). What it does by several operations of all ranks; NONE: by one.
    cdef bint closing
    cdef int purpose
    # What each missing rank did at the last report.
    cdef dict said

    cdef void complete_answer(self, bint joins) noexcept nogil
    cdef void begin_join(self) noexcept nogil
    cdef void end_join(self) noexcept nogil
    cdef int look(self, Served collective, Waiting *waiting, long long time) except -1
    cdef void ask(self, Served collective) noexcept nogil
    cdef int _say(self, Served collective, Waiting *waiting, long long time) except -1
    cdef int _look_for_circle(self, Served collective) except -1
    cdef waits_in(self, Served collective)
    cdef _missing_ranks(self, Served collective)
    cdef _describe_stall(self, Served collective, long long waited, missing)
    cdef _why_missing(self, Served collective, int rank)
    cdef int _abort(self, Served collective, long long waited) except -1
