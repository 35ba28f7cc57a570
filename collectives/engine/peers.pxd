from collectives.engine.all_ranks cimport AllRanks
from collectives.engine.mailbox cimport Mailbox

cdef class PeerExchange(AllRanks):
    cdef readonly Mailbox mailbox
    # Messages are under way.
    cdef bint carries

    cdef void _catch_up_with_messages(self) noexcept nogil
    cdef int _use_mailbox(self, int what, vector=*, long long calls=*) except -1
    cdef int _do_with_mailbox(self, int what, char **arrays, long long calls) except -1 nogil
