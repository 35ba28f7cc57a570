# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One allreduce in flight: the mean of its members' vectors, by the faster of two ways."""

from mpi4py.MPI cimport Comm

from collectives._doubling cimport Doubling
from collectives._slices cimport Slices
from collectives._task cimport Task
from collectives._vectors cimport HEADER, Layout, weight_of
from collectives.protocols.slicing cimport suits


cdef class Exchange:
    """The engine's allreduce of vectors of one layout.

    Args:
        wire_dtype: see `Task`; what is compressed goes in slices only, so that it is rounded once
            on its way and once as a mean.
    """

    def __init__(self, Comm comm, Layout layout, wire_dtype):
        self.task = Task(layout, wire_dtype)
        self.doubling = Doubling(comm, self.task)
        self.slices = Slices(comm, self.task)
        self.length = self.task.wire.size - HEADER

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        char *source, char **user, bint given, bint keeps,
        char **target, char **copy, char **saved
    ) noexcept nogil:
        """Average `source`, a vector in our memory, into the arrays of `target`, over the members.

        Where they are `given`, the arrays of `user`, the application, are averaged instead of the
        source, which holds only their weight; where it `keeps` them, they are there afterwards.

        `target` may be the arrays of `source`. It is left alone if the total weight is zero. `copy`
        and `saved` may be NULL: the mean goes to `copy` as well, and what was in `target` to
        `saved`.
        """
        self.task.members = members
        self.task.size = size
        self.task.me = me
        self.task.tag = tag
        self.task.source = source
        self.task.user = user
        self.task.given = given
        self.task.keeps = keeps
        self.task.taken = 0
        self.task.target = target
        self.task.copy = copy
        self.task.saved = saved
        self.sliced = size > 1 and (self.task.compressed or suits(self.length, size))
        if not self.sliced:
            self.task.take_over()
        if size == 1:
            self.task.weight = weight_of(source)[0]
            self.task.write_source()
        elif self.sliced:
            self.slices.begin()
        else:
            self.doubling.begin()

    cdef bint progress(self) noexcept nogil:
        """Do what can be done without waiting; return whether the mean is there."""
        if self.task.size == 1:
            return True
        return self.slices.progress() if self.sliced else self.doubling.progress()

    cdef void divert(self) noexcept nogil:
        """Receive nothing more into the application's memory, as far as that is possible."""
        if self.sliced:
            self.slices.divert()

    cdef bint uses(self, char **user) noexcept nogil:
        """Whether messages are to or from the application's memory."""
        return self.task.user == user and self.sliced and self.slices.uses()
