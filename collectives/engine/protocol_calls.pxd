from collectives.engine.all_ranks cimport AllRanks
from collectives.engine.calls cimport OTHER_GOALS, OTHER_WISHES
from collectives.engine.counted_messages cimport CountedMessages
from collectives.memory.layout cimport UserVector

cdef enum:
    # The application's call is over; nothing is under way that this rank has begun, in close() and
    # before; all messages have come.
    ANSWERED = OTHER_GOALS
    QUIET
    PAUSED
    EMPTY
    FURTHER_GOALS

cdef enum:
    # What the application wants, beside CALL and PUBLISH.
    PAUSE = OTHER_WISHES
    RESUME
    SETTLE
    FURTHER_WISHES

cdef class ProtocolCalls(AllRanks):
    cdef CountedMessages messages
    # Messages of this call may go on from and to the application's vector once it has ended.
    cdef bint lent

    cdef int _before_call(self) except -1
    cdef UserVector _open(self, vector)
    cdef int _do(self, int what, char **arrays, long long calls) except -1 nogil
    cdef void _forget_user(self) noexcept nogil
    cdef int _use_protocol(self, int what, vector=*, long long calls=*) except -1
