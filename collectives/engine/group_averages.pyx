# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Averages of groups that a protocol forms, besides operations of all ranks.

A rank's groups are averaged one after the other, in its protocol's order; those of other ranks run
at the same time.
"""

from libc.stdlib cimport free
from libc.string cimport memcpy
from mpi4py.MPI cimport Comm

from collectives.engine.group_queue cimport GroupQueue, Step
from collectives.engine.protocol_calls cimport ProtocolCalls
from collectives.engine.served cimport SECOND
from collectives.engine.tags cimport group_tag
from collectives.exchange.clock cimport now
from collectives.exchange.exchange cimport Exchange
from collectives.memory.allocation cimport Memory, zeroed
from collectives.memory.handover cimport UNKNOWN
from collectives.memory.layout cimport UserVector
from collectives.protocols.formed_groups cimport GroupProtocol


cdef class GroupAverages(ProtocolCalls):
    """The averages of one rank, and its contributions.

    Args:
        control, data, like, others: see `Driver`.
        groups: a communicator for groups' messages and exchanges only.
        sharing: whether to average in memory shared by the ranks of a node, if possible.
    """

    def __init__(self, Comm control, Comm data, like, *, Comm groups, bint sharing,
                 bint by_messages=True, **others):
        ProtocolCalls.__init__(self, control, data, like, by_messages=by_messages, **others)
        self.queue = GroupQueue(groups)
        self.messages = self.queue.messages
        self.group_exchange = Exchange(groups, self.layout, None, by_messages)
        self.group_reduction = self.group_exchange.reduction
        if sharing:
            self.node.share(self.group_exchange, False, True)
            if self.layout.space.deferred:  # averages over all ranks: see `Driver`
                self.node.share(self.exchange, False, True)
        self.own = []
        self.last_members = <int *>zeroed(self.size, sizeof(int))
        self.kept_arrays = <char **>zeroed(3 * self.layout.count, sizeof(char *))
        self.met = <double *>zeroed(self.size, sizeof(double))
        if self.last_members == NULL or self.kept_arrays == NULL or self.met == NULL:
            raise MemoryError
        self.model_arrays = self.kept_arrays + self.layout.count
        self.mean_arrays = self.model_arrays + self.layout.count
        # In host memory it has no pages before an average of short vectors or an exception uses it.
        self._place_in_own(self.kept_arrays, &self.kept)

    def __dealloc__(self):
        free(self.last_members)
        free(self.met)
        free(self.kept_arrays)

    cdef int _place_in_own(self, char **arrays, char **vector) except -1:
        """Allocate a vector of this rank's own, and locate its arrays."""
        cdef Memory memory = self.layout.space.allocate(self.layout.size)
        self.own.append(memory)
        vector[0] = memory.address
        self.layout.locate(arrays, memory.address)
        return 0

    def attach(self, GroupProtocol protocol, like):
        """Set the protocol that forms groups, and begin it; a passive rank's model is `like` then.
        """
        cdef UserVector opened
        self.queue.attach(protocol)
        if protocol.passive:
            self._place_in_own(self.model_arrays, &self.model)
            self._place_in_own(self.mean_arrays, &self.mean)
            opened = UserVector(like, self.layout, 0)
            self.layout.copy(self.model_arrays, opened.arrays)
        # Nothing serves this collective yet, so the lock is not needed.
        protocol.passed(now())
        protocol.begin()

    # Progress

    cdef void advance(self) noexcept nogil:
        ProtocolCalls.advance(self)
        if self.queue.progress():
            self.rhythm.beat(now())
        while self._step_group():
            pass
        if self.queue.error != 0:
            self.error = self.queue.error
        if self.group_reduction.error != 0:
            self.error = self.group_reduction.error

    cdef bint is_busy(self) noexcept nogil:
        return (ProtocolCalls.is_busy(self) or self.queue.is_under_way()
                or self.queue.protocol.calling)

    cdef long long progressed(self) noexcept nogil:
        return (self.reduction.progress_count + self.group_reduction.progress_count
                + self.queue.progress_count)

    cdef long long busy_ns(self) noexcept nogil:
        return ProtocolCalls.busy_ns(self) + self.group_reduction.busy_ns

    # Groups

    cdef bint _step_group(self) noexcept nogil:
        """Advance the queue's first step; return whether it advanced."""
        if self.port.copying or self.queue.first == NULL:
            return False
        if self.averaging:
            if not self.group_exchange.progress():
                return False
            self._end_group(self.group_reduction.weight, self.gives)
        elif self.queue.protocol.passive and not self.port.is_here():
            return False
        elif self.queue.first.returns:
            self._return_call()
        elif self.user != NULL and not self.vectors.knows_finite(self.user):
            return False
        else:
            self._begin_group()
        return True

    cdef void _begin_group(self) noexcept nogil:
        """Begin to average this rank's vector with the other members of the queue's first group."""
        cdef Step *group = self.queue.first
        cdef char **arrays
        self.rhythm.beat(now())
        self.in_call = self.queue.protocol.calling and (self.user != NULL or self.has_kept)
        if self.in_call:
            self._add_what_moved()
        if group.size == 1:
            self._end_group(group.weights[0], True)
            return
        arrays = self._choose_vector()
        self.averaging = True
        self.group_reduction.more = group.next == NULL or not group.next.returns
        if self.group_exchange.shares(group.members, group.size):
            self._begin_in_memory(arrays)
        else:
            self._begin_by_messages(arrays)

    cdef char **_choose_vector(self) noexcept nogil:
        """Return the vector to contribute, NULL for none; set `gives`: whether it counts."""
        if not self.in_call:
            if not self.queue.protocol.passive:
                return NULL
            self.gives = True
            return self.mean_arrays
        if self.user == NULL:
            return self.kept_arrays
        self.gives = self.vectors.finite
        if self.vectors.finite == UNKNOWN:
            self.port.unlock_to_copy()
            self.gives = self.layout.all_finite(self.user)
            self.port.lock_after_copy()
        if not self.gives:
            self.contribution.leave_out()
        return self.user

    cdef void _begin_by_messages(self, char **arrays) noexcept nogil:
        """Begin to average these arrays by messages; zeros replace what does not count."""
        cdef Step *group = self.queue.first
        cdef int tag = group_tag(group.number)
        cdef bint gives = arrays != NULL and self.gives
        cdef bint given = gives and arrays == self.user
        cdef char *source = self.kept
        if arrays == NULL or arrays == self.user and not gives:
            self.port.unlock_to_copy()
            self.layout.zero(self.kept_arrays)
            self.port.lock_after_copy()
        elif arrays == self.mean_arrays:
            source = self.mean if self.moved else self.model
        self.group_exchange.begin(
            group.members, group.size, group.me, tag, group.weights[group.me] if gives else 0,
            source, self.user, given, False, self.kept_arrays if arrays == NULL else arrays,
            NULL, NULL)

    cdef void _begin_in_memory(self, char **arrays) noexcept nogil:
        """Begin to average in shared memory; a vector that does not count is not read."""
        cdef Step *group = self.queue.first
        cdef double weight = group.weights[group.me] if arrays != NULL and self.gives else 0
        if arrays == self.mean_arrays and not self.moved:
            self.port.unlock_to_copy()
            self.layout.copy(arrays, self.model_arrays)
            self.port.lock_after_copy()
        self.group_exchange.shared.describe(False, False, weight, weight)
        self.group_exchange.begin_in_memory(
            group.number, True, group.members, group.size, arrays, arrays != NULL, True)

    cdef void _end_group(self, double weight, bint timely) noexcept nogil:
        """End the first group's average, of this total weight; one of one rank changes nothing."""
        cdef Step *group = self.queue.first
        cdef int i
        self.averaging = False
        self.groups_reduced += 1
        if group.size > 1:
            for i in range(group.size):
                self.met[group.members[i]] += 1 / <double>group.size
        if self.in_call:
            memcpy(self.last_members, group.members, group.size * sizeof(int))
            self.last_size = group.size
            self.last_weight = weight
            self.last_timely = timely
            if group.size > 1 and weight > 0:
                self._has_changed()
        else:
            self.groups_passive += 1
            self.moved |= self.queue.protocol.passive and weight > 0 and group.size > 1
        self.queue.finish()

    cdef void _return_call(self) noexcept nogil:
        """Return the call with the application's vector as it is; a passive rank keeps a copy."""
        cdef char **source = self.user if self.user != NULL else self.kept_arrays
        if self.queue.protocol.passive:
            self._add_what_moved()
            self.port.unlock_to_copy()
            self.layout.copy(self.model_arrays, source)
            self.port.lock_after_copy()
            self.moved = False
            self.unreturned = self.user == NULL
        self.has_kept = False
        self.queue.finish()

    cdef void _add_what_moved(self) noexcept nogil:
        """Add to the application's vector what averages changed since its last call returned."""
        if self.moved and not self.unreturned and self.user != NULL:
            self.port.unlock_to_copy()
            self.layout.add_change(self.user, self.mean_arrays, self.user, self.model_arrays)
            self.port.lock_after_copy()
            self._has_changed()
        self.moved = False

    cdef void _has_changed(self) noexcept nogil:
        """Note that the application's vector differs from what it passed."""
        self.changed = True
        self.vectors.finite = UNKNOWN

    # What an exception interrupts

    cdef void _forget_user(self) noexcept nogil:
        """Stop using the application's buffer; its call, if pending, continues without it."""
        cdef long long end = now() + SECOND
        cdef char **user
        self.caller.awaits = False
        while self.port.copying or self.queue.protocol.calling and not self.port.is_here():
            self.port.yield_lock()
        # From here on other threads begin nothing that uses the buffer.
        user, self.user = self.user, NULL
        if user == NULL or not self.queue.protocol.calling:
            return
        if self.averaging and self.in_call:
            self.group_exchange.adopt(self.kept_arrays)
            self.group_reduction.target = self.kept_arrays
            self.group_exchange.divert()
        else:
            self.layout.copy(self.kept_arrays, user)
            self.gives = self.vectors.finite
            if self.vectors.finite == UNKNOWN:
                self.gives = self.layout.all_finite(self.kept_arrays)
        self.has_kept = True
        # Running members complete their messages soon; a stopped one is waited for at most 1 s.
        while (self.averaging and self.group_exchange.uses(user) and self.error == 0
                and now() < end):
            self.group_exchange.progress()
            self.port.yield_lock()
