"""A pending allreduce: the mean of its members' vectors, by one of the transports."""

from mpi4py.MPI cimport Comm

from collectives.exchange.transport cimport Transport
from collectives.memory.layout cimport Layout


cdef class Exchange:
    """The engine's allreduce of vectors of one layout.

    Args:
        wire_dtype: see `Reduction`.
        by_messages: whether vectors are ever sent by messages, rather than in shared memory.
    """

    def __init__(self, Comm comm, Layout layout, wire_dtype, bint by_messages=True):
        self.reduction = Reduction(layout, wire_dtype)
        self.messages = Messages(comm, self.reduction, by_messages)
        self.running = <void *>self.messages

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        double weight, char *source, char **user, bint lent, bint keeps,
        char **target, char **copy, char **saved, int averaged
    ) noexcept nogil:
        """Average `source`, an engine vector, over the members, into the arrays of `target`.

        Only the first arrays are `averaged`: the mean of the others is what this member has.

        If `lent`, the application's arrays, `user`, are averaged instead of the source, with the
        same `weight`; if it also `keeps` them, the source receives a copy.

        `target` may be the arrays of `source`. It is left unchanged if the total weight is zero.
        The mean is also written to `copy`, and the old content of `target` to `saved`, unless
        they are NULL.
        """
        self.reduction.average_arrays(averaged)
        self.reduction.members = members
        self.reduction.size = size
        self.reduction.me = me
        self.reduction.tag = tag
        self.reduction.own_weight = weight
        self.reduction.source = source
        self.reduction.user = user
        self.reduction.lent = lent
        self.reduction.keeps = keeps
        self.reduction.taken = 0
        self.reduction.target = target
        self.reduction.copy = copy
        self.reduction.saved = saved
        self.running = <void *>self.messages
        # Members that share memory use slices, which round as an average in shared memory does.
        self.messages.begin(self.shares(members, size))

    cdef bint shares(self, const int *members, int size) noexcept nogil:
        """Return whether these ranks exchange their vectors in shared memory."""
        return size > 1 and self.shared is not None and self.shared.blocks.joins(members, size)

    cdef void begin_in_memory(
        self, long long number, bint together, const int *members, int size,
        char **user, bint lent, bint ringed, bint keeps
    ) noexcept nogil:
        """Average the snapshots of ranks that share memory, in the exchange of this number.

        Each rank's `Part` describes its vectors. The application's arrays, `user`, receive the mean
        unless they are NULL. If `lent`, they are averaged: they replace the snapshot meanwhile, or
        do not change it if `ringed`. Those in a window are averaged there, unless the snapshot
        `keeps` them. If all members enter the exchange `together`, none executes it for another.
        """
        self.resume_in_memory()
        if self.shared.by_slots(size):
            self.running = <void *>self.shared.slots
        self.shared.begin(number, together, members, size, user, lent, ringed, keeps)

    cdef void resume_in_memory(self) noexcept nogil:
        """Resume an exchange in which another rank has begun this rank's part."""
        self.running = <void *>self.shared
        self.reduction.lent = False

    cdef bint is_in_memory(self) noexcept nogil:
        """Return whether the pending exchange is in shared memory."""
        return self.running != <void *>self.messages

    # What a pending exchange does: see `Transport`

    cdef bint progress(self) noexcept nogil:
        return (<Transport>self.running).progress()

    cdef void adopt(self, char **kept) noexcept nogil:
        (<Transport>self.running).adopt(kept)

    cdef void divert(self) noexcept nogil:
        (<Transport>self.running).divert()

    cdef void leave(self) noexcept nogil:
        (<Transport>self.running).leave()

    cdef bint uses(self, char **user) noexcept nogil:
        return (<Transport>self.running).uses(user)
