from collectives.engine.transfers cimport Transfer, Transfers
from collectives.memory.blocks cimport Blocks
from collectives.memory.handover cimport Handover
from collectives.memory.layout cimport Layout

cdef enum What:
    # What a step does. X is the model, D the change or what the application last got, U the
    # application's buffer, M a received vector.
    RECORD  # D = U − D, or where X is what the application last got, D = U − X
    SAVE  # D = X
    ZERO  # D = 0
    KEEP  # D = U
    PUBLISH  # X += share · D, or where U is given and is X + D, X = U
    SCALE  # X = share · X
    LOOK_AHEAD  # X, S = X + share · (X − S), X
    SEND  # send X or D
    MIX  # X = keep · X + share · M
    HALVE  # send (X − M) / 2 back, and subtract it from X
    RETURN  # U = X, or D = share · X, U = D

cdef struct Step:
    What what
    double keep, share
    char **user
    # Of RECORD: whether D = U − X; the only step that uses that D, of which few blocks are kept
    # then, in turns.
    bint against_model
    Step *reader
    bint in_turns
    # Of MIX and HALVE: where M arrives; NULL: nowhere, for want of memory, so the step does nothing.
    Transfer *source
    # Of SEND: which vector; of SEND and HALVE: the transfers to its destinations.
    char *memory
    Transfer *outgoing
    # Number of blocks that it has been executed on.
    int done
    Step *next

cdef class PeerVectors:
    cdef readonly Layout layout
    cdef Blocks blocks
    cdef Transfers messages
    # The model; what the application last got, and from its call on its change of that.
    cdef char *model
    cdef char *change
    cdef char **model_arrays
    cdef char **change_arrays
    # S, a model of earlier, of a method that looks ahead.
    cdef char *earlier
    cdef char **earlier_arrays
    # Of the received vector in use.
    cdef char **arrays
    # Of a change of which no more than a few blocks are kept, in turns.
    cdef char *kept
    cdef char **kept_arrays
    # A RECORD step that was added since steps were last executed; or NULL.
    cdef Step *recording
    # Steps to be executed, in order, and steps that are not in use.
    cdef Step *first
    cdef Step *last
    cdef Step *idle
    # While `arrives`, the application's arrays arrive from there and are given back block by block.
    cdef Handover handover
    cdef bint arrives
    # Number of RECORD, SAVE, KEEP and RETURN steps, which the application's call waits for.
    cdef int answers
    cdef int error

    cdef Step *add(self, What what, double share, char **user) noexcept nogil
    cdef Step *add_use(
        self, What what, Transfer *source, double keep, double share) noexcept nogil
    cdef void abandon(self) noexcept nogil
    cdef void look_ahead(self, double momentum) noexcept nogil
    cdef bint run(self) noexcept nogil
    cdef bint _may_do(self, Step *step) noexcept nogil
    cdef bint _writes_change(self, Step *step) noexcept nogil
    cdef char **_change_of(self, Step *step, int block) noexcept nogil
    cdef void record(self, char **user, bint against_model) noexcept nogil
    cdef void publish(self, double share) noexcept nogil
    cdef void _record_all(self, Step *step) noexcept nogil
    cdef void _do(self, Step *step, int block) noexcept nogil
    cdef void _look_ahead(self, int block, double momentum) noexcept nogil
    cdef void _halve(self, Step *step, int block) noexcept nogil
    cdef void _locate(self, Transfer *transfer, int block) noexcept nogil
    cdef void _remove_done(self) noexcept nogil
    cdef bint forget_user(self) noexcept nogil
