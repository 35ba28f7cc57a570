"""Averages by messages, by the fastest algorithm."""

from mpi4py.MPI cimport Comm

from collectives.memory.layout cimport HEADER
from collectives.protocols.slicing cimport suits


cdef class Messages(Transport):
    """The reduction's allreduce by messages.

    Args:
        used: whether vectors are ever sent by messages, rather than in shared memory.
    """

    def __init__(self, Comm comm, Reduction reduction, bint used):
        self.reduction = reduction
        self.doubling = Doubling(comm, reduction)
        self.slices = Slices(comm, reduction, used)

    cdef void begin(self, bint sliced) noexcept nogil:
        """Begin the reduction; if `sliced`, it is to round as slices do.

        Compressed vectors use slices only, so that they are rounded once when sent and once as a
        mean.
        """
        cdef int size = self.reduction.size
        cdef Py_ssize_t length = self.reduction.end - HEADER
        self.others_left = self.reduction.averaged < self.reduction.layout.count
        self.sliced = size > 1 and (
            sliced or self.reduction.compression is not None or suits(length, size)
            or self.reduction.space.deferred)
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
            self.reduction.count = self.reduction.own_count
            self.reduction.write_source()
            self.written = self.reduction.space.begun()
        else:
            self._write_others()
            self.doubling.begin()

    cdef bint progress(self) noexcept nogil:
        if self.coming:
            self._begin_whole()
            if self.coming:
                return False
        if self.reduction.size == 1:
            return self.reduction.space.over(self.written)
        if not self.sliced:
            return self.doubling.progress()
        if not self.slices.progress():
            return False
        if self.others_left:
            if not self.reduction.has_user(self.reduction.wire.size):
                return False
            self._write_others()
            self.reduction.give_back_user(self.reduction.wire.size)
        return self.reduction.space.over(self.written)

    cdef void _write_others(self) noexcept nogil:
        """Write the arrays that are not averaged, if there are any."""
        if self.others_left:
            self.others_left = False
            self.reduction.write_others()
        self.written = self.reduction.space.begun()

    cdef void adopt(self, char **kept) noexcept nogil:
        if self.coming:
            self._begin_whole()
        if self.sliced:
            self.reduction.adopt(kept != NULL)
        elif kept != NULL:
            self.reduction._copy_target(kept, 0, self.doubling.low)

    cdef void divert(self) noexcept nogil:
        if self.sliced:
            self.slices.divert()

    cdef bint uses(self, char **user) noexcept nogil:
        return self.reduction.user == user and self.sliced and self.slices.uses()
