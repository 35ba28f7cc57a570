from collectives.engine.guard cimport Guard
from collectives.engine.ports cimport EnginePort
from collectives.engine.served cimport Served
from collectives.engine.waiting cimport Waiter
from collectives.memory.handover cimport Handover
from collectives.memory.layout cimport UserVector
from collectives.protocols.rank cimport RankProtocol

cdef enum:
    # What a caller waits for: its call or operation is complete,
    DONE
    # or it has ended in a disagreement;
    SETTLED
    # no interrupted operation is pending,
    OVER
    # nor a version of an interrupted call;
    CAUGHT_UP
    # this rank may leave.
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
    cdef Served collective
    cdef UserVector vector
    cdef double weight
    # For a vector on a device, which may still be arriving when the call is started; else None.
    cdef Handover handover
    cdef object result, error

    cdef bint _is_settled(self) except -1

cdef class Caller:
    cdef RankProtocol steps
    cdef EnginePort port
    cdef Waiter waiter
    cdef Call pending
    # The pending call begins once its vector can be used: its arrays and weight.
    cdef bint awaits
    cdef char **awaited_arrays
    cdef double awaited_weight
    # When this rank last asked whether its device has failed.
    cdef long long looked
    # The last call's, kept until the next: pending messages of an interrupted call may use it.
    cdef UserVector last_vector
    # Taken while a call has not returned.
    cdef Guard guard
    cdef long long calls_ns

    cdef Call carry_out(self, Served collective, int what, vector, int flags, weight=*,
                        long long version=*, Handover handover=*)
    cdef Call start(self, Served collective, int what, vector, int flags, weight,
                    long long version=*, Handover handover=*)
    cdef int _enter(self, Served collective) except -1
    cdef void _leave(self, Served collective, int what, long long began) noexcept
    cdef void count_time(
        self, Served collective, int what, long long began, long long version) noexcept nogil
    cdef Call _begin(self, Served collective, int what, vector, int flags, weight,
                     long long version, Handover handover)
    cdef Call _open_call(self, Served collective, int what, vector, int flags, weight)
    cdef int _begin_with(self, Served collective, Call call, int what, long long version) except -1
    cdef int give(
        self, Served collective, int what, char **arrays, double weight) except -1 nogil
    cdef double counted(self, int what, double weight) noexcept nogil
    cdef int complete(self, Served collective) except -1
    cdef bint test(self, Served collective) except -1
    cdef int _complete_pending(self, Served collective) except -1
    cdef int settle(self, Served collective, Call call) except -1
    cdef int _forget(self, Call call) except -1
    cdef void _abandon(self, Served collective) noexcept nogil
    cdef bint _drain(self, Served collective) noexcept nogil
    cdef bint has_started(self) noexcept nogil
    cdef void begin_awaited(self, Served collective) noexcept nogil
    cdef bint _withdraw(self, Served collective) noexcept nogil
    cdef void look_for_errors(self) noexcept nogil

cdef new_result(tuple fields)
cdef int give_back_interrupted(Handover handover) except -1
