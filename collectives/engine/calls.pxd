from collectives.engine.guard cimport Guard
from collectives.engine.interruptible cimport Interruptible
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport Handover

cdef enum:
    # What a caller waits for: an operation or call; also where ranks have disagreed; nothing that
    # an exception interrupted goes on; nor a version of it; the end.
    DONE
    SETTLED
    OVER
    CAUGHT_UP
    LEFT
    # From here on what subclasses add.
    OTHER_GOALS

cdef enum:
    # What the application wants, beside the synchronous operations.
    CALL = 100
    PUBLISH
    OTHER_WISHES

cdef enum:
    # In place of a buffer's flags: the application gives no vector.
    NO_VECTOR = -1

cdef class Call:
    cdef Calls collective
    cdef UserVector vector
    cdef double weight
    # Where the vector is a copy of one on a device, which is on its way when the call is given.
    cdef Handover handover
    cdef object result, error

    cdef bint _is_settled(self) except -1

cdef class Calls(Interruptible):
    cdef readonly int pid
    cdef Call pending
    # The pending call begins once its vector is there; what it is about.
    cdef bint awaits
    cdef Handover awaited
    cdef char **awaited_arrays
    cdef double awaited_weight
    # Until the next call: messages of an interrupted one may still be to and from its memory.
    cdef UserVector last_vector
    # Python is in a call that has not returned.
    cdef Guard guard
    cdef long long calls_ns

    cdef int _begin(self, int what) except -1 nogil
    cdef void _begin_awaited(self) noexcept nogil
    cdef bint _withdraw(self) noexcept nogil
    cdef bint _misses(self, int goal) noexcept nogil
    cdef _missing(self)
    cdef bint _is_failed(self, int goal) noexcept nogil
    cdef bint _is_calls(self, int goal) noexcept nogil
    cdef int _check_owner(self) except -1
    cdef int _check_usable(self) except -1
    cdef Call _carry_out(self, int what, vector, int flags, weight=*, long long version=*,
                         Handover handover=*)
    cdef Call _start(self, int what, vector, int flags, weight, long long version=*,
                     Handover handover=*)
    cdef Call _open_call(self, int what, vector, int flags, weight)
    cdef int _begin_with(self, Call call, int what, long long version) except -1
    cdef int _give(self, int what, char **arrays, double weight) except -1 nogil
    cdef double _counted(self, int what, double weight) noexcept nogil
    cdef int _enter(self) except -1
    cdef int _forget_disagreement(self) except -1
    cdef int _complete(self) except -1
    cdef int _complete_pending(self) except -1
    cdef int _give_back_interrupted(self, Handover handover) except -1
    cdef int _forget(self, Call call) except -1
    cdef int _settle(self, Call call) except -1
    cdef _result(self)

cdef new_result(tuple fields)
