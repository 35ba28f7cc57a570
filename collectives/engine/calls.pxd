from collectives.engine.guard cimport Guard
from collectives.engine.interruptible cimport Interruptible
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport Handover

cdef enum:
    # What a caller waits for: its call or operation is complete; or ended in a disagreement; no
    # interrupted operation is pending; nor a version of an interrupted call; this rank may leave.
    DONE
    SETTLED
    OVER
    CAUGHT_UP
    LEFT
    # The first goal of subclasses.
    OTHER_GOALS

cdef enum:
    # What the application requests, besides the synchronous operations.
    CALL = 100
    PUBLISH
    OTHER_WISHES

cdef enum:
    # In place of a buffer's flags: the application passes no vector.
    NO_VECTOR = -1

cdef class Call:
    cdef Calls collective
    cdef UserVector vector
    cdef double weight
    # For a vector on a device, which may still be arriving when the call is started; else None.
    cdef Handover handover
    cdef object result, error

    cdef bint _is_settled(self) except -1

cdef class Calls(Interruptible):
    cdef readonly int pid
    cdef Call pending
    # Whether the application has been told of the engine's error.
    cdef bint said_error
    # The pending call begins once its vector can be used: its handover, arrays and weight.
    cdef bint awaits
    cdef Handover awaited
    cdef char **awaited_arrays
    cdef double awaited_weight
    # When this rank last asked whether its device has failed.
    cdef long long looked
    # Kept until the next call: pending messages of an interrupted one may use its memory.
    cdef UserVector last_vector
    # Taken while a call has not returned.
    cdef Guard guard
    cdef long long calls_ns

    cdef int _begin(self, int what) except -1 nogil
    cdef void _begin_awaited(self) noexcept nogil
    cdef bint _withdraw(self) noexcept nogil
    cdef bint _misses(self, int goal) noexcept nogil
    cdef _missing(self)
    cdef bint _is_broken(self, int goal) noexcept nogil
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
