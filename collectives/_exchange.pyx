# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One allreduce in flight: the mean of its members' vectors, by the fastest way there is."""

from mpi4py.MPI cimport Comm

from collectives._doubling cimport Doubling
from collectives._shared cimport Shared
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
        self.in_memory = False
        # Members that share memory send what is to be rounded as an average in memory would be.
        self.sliced = size > 1 and (self.task.compressed or suits(self.length, size)
                                    or self.shares(members, size))
        if not self.sliced:
            self.task.take_over(True)
        if size == 1:
            self.task.weight = weight_of(source)[0]
            self.task.write_source()
        elif self.sliced:
            self.slices.begin()
        else:
            self.doubling.begin()

    cdef bint shares(self, const int *members, int size) noexcept nogil:
        """Whether these ranks exchange their vectors in the memory that they share."""
        return size > 1 and self.shared is not None and self.shared.joins(members, size)

    cdef void begin_in_memory(
        self, long long number, bint operation, const int *members, int size,
        char **user, bint given, bint ringed, char **target, char **copy
    ) noexcept nogil:
        """Average the snapshots of ranks that share memory, as their parts say, by a number.

        The application's arrays `user` may be NULL. Where they are `given`, they replace the
        snapshot meanwhile, or, `ringed`, leave it alone; they get the mean. `target` and `copy` are
        only noted.
        """
        self._note(target, copy)
        self.shared.begin(number, operation, members, size, user, given, ringed)

    cdef void resume_in_memory(self, char **target) noexcept nogil:
        """Go on with an exchange that another rank has begun this one's part in."""
        self._note(target, NULL)

    cdef void _note(self, char **target, char **copy) noexcept nogil:
        self.in_memory = True
        self.task.given = False
        self.task.target = target
        self.task.copy = copy
        self.task.saved = NULL

    cdef bint progress(self) noexcept nogil:
        """Do what can be done without waiting; return whether the mean is there."""
        if self.in_memory:
            return self.shared.progress()
        if self.task.size == 1:
            return True
        return self.slices.progress() if self.sliced else self.doubling.progress()

    cdef void take_over(self, char **kept) noexcept nogil:
        """Publish what is left of the application's arrays: they are not to be used any longer.

        Where nothing else has what they have got so far, `kept` takes it: the arrays of the source,
        which are then to be the target. Else it is NULL.
        """
        if self.in_memory:
            self.shared.take_over(kept)
        elif self.sliced:
            self.task.take_over(kept != NULL)
        elif kept != NULL:
            self.task._copy_target(kept, 0, self.doubling.low)

    cdef void divert(self) noexcept nogil:
        """Receive nothing more into the application's memory, as far as that is possible."""
        if self.sliced and not self.in_memory:
            self.slices.divert()

    cdef bint uses(self, char **user) noexcept nogil:
        """Whether an exchange under way uses the application's memory, or what it is kept in."""
        if self.in_memory:
            return self.shared.uses()
        return self.task.user == user and self.sliced and self.slices.uses()
