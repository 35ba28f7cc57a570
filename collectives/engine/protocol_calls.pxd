from collectives.engine.collective cimport NativeCollective
from collectives.engine.calls cimport OTHER_GOALS, OTHER_WISHES
from collectives.engine.counted_messages cimport CountedMessages
from collectives.memory.layout cimport UserVector

cdef enum:
    # The application's call is complete;
    ANSWERED = OTHER_GOALS
    # nothing that this rank has begun is pending, in close(),
    QUIET
    # and in pause();
    PAUSED
    # all messages have arrived.
    DRAINED
    FURTHER_GOALS

cdef enum:
    # What the application requests, besides CALL and PUBLISH.
    PAUSE = OTHER_WISHES
    RESUME
    SETTLE
    FURTHER_WISHES

cdef class ProtocolCalls(NativeCollective):
    cdef CountedMessages messages
    # Messages of this call may still use the application's buffer once the call has ended.
    cdef bint lent

    cdef void let_go(self) noexcept
    cdef int _before_call(self) except -1
    cdef UserVector _open(self, vector)
    cdef int _do(self, int what, char **arrays, long long calls) except -1 nogil
    cdef void _forget_user(self) noexcept nogil
    cdef int _use_protocol(self, int what, vector=*, long long calls=*) except -1
