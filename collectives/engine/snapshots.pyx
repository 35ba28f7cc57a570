# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A rank's snapshot, in its own memory, or in memory shared with other ranks of the node."""

from collectives.engine.all_ranks cimport AllRanks
from collectives.protocols.contribution cimport RESULT, SNAPSHOT
from collectives.protocols.wait_avoiding cimport IDLE, SHARED


cdef class Snapshots(AllRanks):
    """A rank's snapshot, and the ranks that may use it: see `GroupVersions`."""

    cdef int _allocate_vectors(self, bint sharing) except -1:
        """Allocate snapshot and result vector as one, which other ranks can map if `sharing`."""
        cdef Py_ssize_t vector = self.layout.size
        cdef char *result
        if sharing:
            # On devices all averages are in shared memory: see `AllRanks`.
            self._share_memory(
                self.exchange, True, not self.versioning.passive or self.layout.space.deferred,
                self.groups)
        if self.shared is not None:
            self.snapshot = self.shared.memory.snapshot(self.rank)
            result = self.shared.memory.result(self.rank)
        else:
            self.memory = self.layout.space.allocate(2 * vector)
            self.snapshot = self.memory.address
            result = self.snapshot + vector
        if self.shared is None or self.layout.space.deferred:  # a shared segment is zero
            self.layout.space.zero(self.snapshot, 2 * vector)
        self.vectors.place(SNAPSHOT, self.snapshot)
        self.vectors.place(RESULT, result)
        return 0

    # Vectors that other ranks may use

    cdef void _open(self) noexcept nogil:
        """Open the vectors to other ranks, to execute versions for this one, if they are SHARED.

        Only once this rank's own passes over the vectors are complete.
        """
        if self.versioning.vectors != SHARED or self.opened:
            return
        if not self.layout.space.over(self.layout.space.begun()):
            return
        self.opened = True
        self.opened_for = self.versioning.next
        self.publishing.begin_version()
        self._describe()
        self.shared.open(self.versioning.next + self.data_ops)

    cdef void _reclaim(self) noexcept nogil:
        """Close the vectors to other ranks, and learn what these have executed."""
        cdef bint running = False
        if self.versioning.vectors != SHARED:
            return
        if self.opened:
            self.opened = False
            running = self.shared.close()
            self._note_executed(self.shared.number - self.data_ops)
            if self.versioning.next > self.opened_for:
                self.groups.find(self.versioning.next - 1 + self.protocol.base)
                self.publishing.executed(
                    self.shared.parts[self.rank].total, self.shared.parts[self.rank].replaced)
        self.versioning.reclaim(running)
        if running:
            self.begun = True
            self.groups.find(self.versioning.running + self.protocol.base)
            self.exchange.resume_in_memory()

    cdef void _note_executed(self, long long end) noexcept nogil:
        """Note that other ranks have executed every version before `end` for this one."""
        cdef long long version
        for version in range(self.versioning.next, end):
            self._count_version(version)
        self.versioning.executed(end)

    cdef void _execute_shared(self) noexcept nogil:
        """Help to execute a started version in shared memory; take it over if it needs messages.

        On devices only a caller helps: the driver, or a busy device, would delay the others for
        the blocks that the progress thread has taken. Whoever needs the version executes it.
        """
        cdef long long number
        if not self.opened:
            return
        # Read once: others may advance to a version that no rank has started.
        number = self.shared.reached()
        if not self._is_started(number - self.data_ops):
            return
        if self.shared.needs_messages(number):
            self._reclaim()
            if self.versioning.vectors == IDLE:
                self.versioning.execute()
        elif not self._leaves_to_others() and self.shared.help(self.rank, number):
            self.reduction.progress_count += 1

    cdef bint _is_open(self) noexcept nogil:
        """Return whether other ranks can execute versions for this one, or need not."""
        return self.opened or self.versioning.vectors != SHARED

    cdef bint _awaits_device(self) noexcept nogil:
        """Return whether other ranks wait for what a device still does for this one."""
        return not self._is_open() or self.shared is not None and self.shared.count_averaging > 0

    cdef bint _is_behind(self) noexcept nogil:
        """Return whether a started version is still to be executed with the open vectors."""
        return (self.opened and not self._leaves_to_others()
                and self._is_started(self._next()))

    cdef bint _leaves_to_others(self) noexcept nogil:
        """Return whether this thread executes no versions with the open vectors."""
        return self.layout.space.deferred and self.waiting_callers == 0

    cdef bint _is_started(self, long long version) noexcept nogil:
        """Return whether this version has been started and may be executed now."""
        return version <= self.versioning.told and self.versioning.told_ops <= self.protocol.ops

    cdef long long _next(self) noexcept nogil:
        """Return the next version to be executed for this rank."""
        if self.opened:
            return self.shared.reached() - self.data_ops
        return self.versioning.next

    cdef void _describe(self) noexcept nogil:
        """Tell other ranks of the node where this rank's mean goes, and its vector's weight."""
        self.shared.describe(
            self.publishing.target == SNAPSHOT or self.publishing.copy == SNAPSHOT,
            self.publishing.saved == RESULT,
            self.publishing.weight, self.publishing.weight_after())

    cdef void _renumber(self) noexcept nogil:
        """Number exchanges in shared memory onwards from the last operation."""
        if self.shared is not None:
            self.shared.oldest = self.protocol.version + self.data_ops
            self.shared.shift = self.protocol.base - self.data_ops

    cdef void _count_version(self, long long version) noexcept nogil:
        cdef long long staleness = version - self.publishing.published_version
        self.versions += 1
        self.passive += staleness != 0
        self.staleness[min(staleness, MOST_STALENESS)] += 1
