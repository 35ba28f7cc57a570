from collectives.engine.group_queue cimport GroupQueue
from collectives.engine.protocol_calls cimport ProtocolCalls
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.reduction cimport Reduction

cdef class GroupAverages(ProtocolCalls):
    cdef readonly GroupQueue queue
    cdef Exchange group_exchange
    cdef Reduction group_reduction
    # The exchange of the queue's first group is pending; it is for the application's call.
    cdef bint averaging, in_call
    # The application's call has changed its vector.
    cdef bint changed
    # The application's arrays; NULL outside calls, or once an exception has ended the call.
    cdef char **user
    # The memory of this rank's vectors.
    cdef list own
    # What replaces the application's vector then; zeros where this rank contributes nothing.
    cdef char *kept
    cdef char **kept_arrays
    # Whether `kept` replaces the application's vector; whether what is contributed is finite.
    cdef bint has_kept, gives
    # Of passive ranks: what the application last got, and its mean with others since (if `moved`).
    # `unreturned`: the application does not have the former, since an exception ended its call.
    cdef char *model
    cdef char *mean
    cdef char **model_arrays
    cdef char **mean_arrays
    cdef bint moved, unreturned
    # The last group of the call: its members, the weight of its mean, whether it was timely.
    cdef int *last_members
    cdef int last_size
    cdef double last_weight
    cdef bint last_timely
    cdef long long groups_reduced, groups_passive
    # For each rank, the sum of 1/|S| over the groups S with both it and this one.
    cdef double *met

    cdef int _place_in_own(self, char **arrays, char **vector) except -1
    cdef bint _step_group(self) noexcept nogil
    cdef void _begin_group(self) noexcept nogil
    cdef char **_choose_vector(self) noexcept nogil
    cdef void _begin_by_messages(self, char **arrays) noexcept nogil
    cdef void _begin_in_memory(self, char **arrays) noexcept nogil
    cdef void _end_group(self, double weight, bint timely) noexcept nogil
    cdef void _return_call(self) noexcept nogil
    cdef void _add_what_moved(self) noexcept nogil
    cdef void _has_changed(self) noexcept nogil
