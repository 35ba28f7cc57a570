# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A pending allreduce: the mean of its members' vectors, by the fastest algorithm."""

from mpi4py.MPI cimport Comm

from collectives.exchange.doubling cimport Doubling
from collectives.exchange.slices cimport Slices
from collectives.exchange.reduction cimport Reduction
from collectives.memory.layout cimport HEADER, Layout
from collectives.protocols.slicing cimport suits


cdef class Exchange:
    """The engine's allreduce of vectors of one layout.

    Args:
        wire_dtype: see `Reduction`; compressed vectors use slices only, so that they are rounded
            once when sent and once as a mean.
        by_messages: whether vectors are ever sent by messages, rather than in shared memory.
    """

    def __init__(self, Comm comm, Layout layout, wire_dtype, bint by_messages=True):
        self.reduction = Reduction(layout, wire_dtype)
        self.doubling = Doubling(comm, self.reduction)
        self.slices = Slices(comm, self.reduction, by_messages)
        self.length = self.reduction.wire.size - HEADER

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        double weight, char *source, char **user, bint given, bint keeps,
        char **target, char **copy, char **saved
    ) noexcept nogil:
        """Average `source`, an engine vector, over the members, into the arrays of `target`.

        If `given`, the arrays of `user`, the application, are averaged instead of the source, with
        the same `weight`; if `keeps`, the source holds a copy of them afterwards.

        `target` may be the arrays of `source`. It is left unchanged if the total weight is zero.
        The mean is also written to `copy`, and the old content of `target` to `saved`, unless
        they are NULL.
        """
        self.reduction.members = members
        self.reduction.size = size
        self.reduction.me = me
        self.reduction.tag = tag
        self.reduction.own_weight = weight
        self.reduction.source = source
        self.reduction.user = user
        self.reduction.given = given
        self.reduction.keeps = keeps
        self.reduction.taken = 0
        self.reduction.target = target
        self.reduction.copy = copy
        self.reduction.saved = saved
        self.in_memory = False
        # Members that share memory use slices, which round as an average in shared memory does.
        self.sliced = size > 1 and (self.reduction.compressed or suits(self.length, size)
                                    or self.reduction.space.deferred or self.shares(members, size))
        self.coming = not self.sliced
        if self.sliced:
            self.slices.begin()
        else:
            self._begin_whole()

    cdef void _begin_whole(self) noexcept nogil:
        """Begin an algorithm that reads the whole vector at once, if all of it has arrived."""
        if not self.reduction.has_user(self.reduction.wire.size):
            return
        self.coming = False
        self.reduction.adopt(True)
        if self.reduction.size == 1:
            self.reduction.weight = self.reduction.own_weight
            self.reduction.write_source()
            self.written = self.reduction.space.begun()
        else:
            self.doubling.begin()

    cdef bint shares(self, const int *members, int size) noexcept nogil:
        """Return whether these ranks exchange their vectors in shared memory."""
        return size > 1 and self.shared is not None and self.shared.blocks.joins(members, size)

    cdef void begin_in_memory(
        self, long long number, bint together, const int *members, int size,
        char **user, bint given, bint ringed
    ) noexcept nogil:
        """Average the snapshots of ranks that share memory, in the exchange of this number.

        Each rank's `Part` describes its vectors. The application's arrays `user` may be NULL; else
        they receive the mean. If `given`, they replace the snapshot during the exchange, or leave
        it alone if `ringed`. If all members enter it `together`, none executes it for another.
        """
        self.resume_in_memory()
        self.shared.begin(number, together, members, size, user, given, ringed)

    cdef void resume_in_memory(self) noexcept nogil:
        """Resume an exchange in which another rank has begun this rank's part."""
        self.in_memory = True
        self.coming = False
        self.reduction.given = False

    cdef bint progress(self) noexcept nogil:
        """Progress without blocking; return whether the mean is complete."""
        if self.in_memory:
            return self.shared.progress()
        if self.coming:
            self._begin_whole()
            if self.coming:
                return False
        if self.reduction.size == 1:
            return self.reduction.space.over(self.written)
        return self.slices.progress() if self.sliced else self.doubling.progress()

    cdef void adopt(self, char **kept) noexcept nogil:
        """Publish the rest of the application's arrays and stop using them.

        If no other vector holds the part of the mean that they have received, `kept` receives it:
        the arrays of the source, which the caller then makes the target; else `kept` is NULL.
        Arrays from a device must have arrived.
        """
        if self.in_memory:
            self.shared.adopt(kept)
            return
        if self.coming:
            self._begin_whole()
        if self.sliced:
            self.reduction.adopt(kept != NULL)
        elif kept != NULL:
            self.reduction._copy_target(kept, 0, self.doubling.low)

    cdef void divert(self) noexcept nogil:
        """Stop receiving into the application's buffer, as far as that is possible."""
        if self.sliced and not self.in_memory:
            self.slices.divert()

    cdef bint uses(self, char **user) noexcept nogil:
        """Return whether a pending exchange uses the application's buffer or its kept copy."""
        if self.in_memory:
            return self.shared.uses()
        return self.reduction.user == user and self.sliced and self.slices.uses()
