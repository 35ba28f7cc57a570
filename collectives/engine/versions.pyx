# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Wait-avoiding group averages: versions that any rank starts, and all ranks execute.

This module drives `WaitAvoidingProtocol` and the exchanges. A rank that is computing takes part with
its snapshot, by its progress thread or in the memory shared by the ranks of its node.
"""

from cpython.buffer cimport PyBUF_WRITABLE
from libc.stdlib cimport free
from libc.string cimport memcpy
from mpi4py.MPI cimport Comm

from collectives.engine.activation_tree cimport ActivationTree
from collectives.engine.calls cimport CALL, CAUGHT_UP, DONE, OTHER_GOALS, PUBLISH, Call, new_result
from collectives.engine.snapshots cimport MOST_STALENESS, Snapshots
from collectives.exchange.clock cimport now
from collectives.exchange.doubling cimport PHASES
from collectives.exchange.mutex cimport (
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.allocation cimport zeroed
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport Handover
from collectives.protocols.all_ranks cimport (
    AVERAGE,
    JOIN,
    OUTSIDE,
    SYNC,
)
from collectives.protocols.contribution cimport NOWHERE, SNAPSHOT, X, SnapshotProtocol
from collectives.protocols.groups cimport Groups
from collectives.protocols.wait_avoiding cimport (
    HELD,
    RUNNING,
    SHARED,
    WaitAvoidingProtocol,
    drawn,
)

from collectives.topology import activation_peers, propagation_bound

cdef enum:
    VECTORS_HELD = OTHER_GOALS
    OPENED

cdef class GroupVersions(Snapshots):
    """One wait-avoiding group allreduce on this rank: its vectors, versions and application.

    Args:
        control, data, like: see `AllRanks`.
        group_size, sync_period, fixed: the groups' size, versions from one average over all ranks
            to the next, and whether the groups are the same in all versions.
        passive: whether ranks take part in a version before their application calls.
        conserving, summing: what ranks contribute; see `GroupAllreduce` and `PartialAllreduce`.
        weighing: the vectors' weights, as `settings.weighing` returns them.
        drawing_seed: seed for drawing the one rank that may start each version; None: any may.
        sharing: whether to allocate memory that other ranks can map.
        initial: the vector that `like` is a copy of, if it is in other memory; None: `like`.
        others: the other arguments of `AllRanks`.
    """

    def __init__(self, Comm control, Comm data, like, *, int group_size, sync_period, bint fixed,
                 bint passive, bint conserving, bint summing, weighing,
                 drawing_seed, bint sharing, initial=None, **others):
        cdef UserVector opened
        cdef ActivationTree tree
        Snapshots.__init__(self, control, data, like, **others)
        self.groups = Groups(self.rank, self.size, group_size, fixed)
        dimensions = len(activation_peers(self.rank, self.size))
        self.versioning = WaitAvoidingProtocol(dimensions, group_size, sync_period, passive)
        if drawing_seed is not None:
            self.versioning.draw(self.rank, self.size, drawing_seed)
        # Engines drift apart by at most the bound, so tags that repeat later are never confused.
        # Members of one group drift apart by one version only; fixed groups meet no other ranks.
        self.window = 4 * propagation_bound(self.size, group_size) + 4 if group_size > 1 else 1
        tree = ActivationTree(control, self.versioning, self.window)
        tree.versioning = self.versioning
        self.publishing = SnapshotProtocol(self.vectors, self.versioning, conserving, summing)
        self.publishing.weigh_by(weighing[0], weighing[1], weighing[2])
        self._begin_protocol(self.versioning, tree, self.publishing)
        self.taken = <int *>zeroed(self.size, sizeof(int))
        if self.taken == NULL:
            raise MemoryError
        self._allocate_vectors(sharing)
        if initial is None:
            initial = like[0] if self.layout.single else like
        opened = UserVector(initial, self.layout, 0)
        self.vectors.of[X] = opened.arrays
        self.publishing.replace()
        self.publishing.count_once()

    def compress_from_initial(self):
        """Send compressed vectors as differences from the initial one, which all ranks have."""
        self.reduction.remember(self.snapshot)

    def listen(self):
        Snapshots.listen(self)
        self.versioning.share(self.shares)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self._renumber()
            self.versioning.run()
            self._open()
            self._wait(OPENED)
            pthread_mutex_unlock(&self.lock)

    def __dealloc__(self):
        free(self.taken)

    # Progress

    cdef void _advance(self) noexcept nogil:
        if self.versioning.vectors == SHARED:
            self._execute_shared()
        Snapshots._advance(self)
        self._open()
        if self.shared is not None:
            self.shared.end_blocks()

    cdef bint _is_busy(self) noexcept nogil:
        return (Snapshots._is_busy(self) or self.versioning.due != 0 or self.publishing.calling
                or self._is_behind() or self._awaits_device())

    cdef bint _step(self) noexcept nogil:
        """Advance the running version, else the call, by one step; return whether it advanced."""
        if self.versioning.vectors == RUNNING:
            if not self.begun:
                self._begin_version()
            if not self.exchange.progress():
                return False
            self._finish_version()
        elif self.copying:
            return False
        elif not self.publishing.calling:
            return Snapshots._step(self)
        elif self.versioning.vectors != HELD:
            return False
        elif self.versioning.timely and not self.publishing.published:
            if not self._may_give():
                return False
            self._lend()
            self.versioning.published()
        elif not self._is_here() or not (self.versioning.timely or self._may_give()):
            return False
        else:
            self._complete_call()
        self.reduction.progress_count += 1
        return True

    cdef void _before_operation(self) noexcept nogil:
        self._reclaim()

    # Versions and averages over all ranks

    cdef void _begin_version(self) noexcept nogil:
        cdef long long version = self.versioning.running
        cdef int me = self.groups.find(version + self.protocol.base)
        cdef int tag = <int>(version % self.window) * PHASES
        self.begun = True
        self.rhythm.beat(now())
        self.publishing.begin_version()
        if self.exchange.shares(self.groups.members, self.groups.count):
            self._describe()
            self.exchange.begin_in_memory(
                version + self.data_ops, False, self.groups.members, self.groups.count,
                self.vectors.of[X] if self.publishing.direct else NULL, self.publishing.lent,
                self.publishing.bypasses_snapshot())
        else:
            self._begin_exchange(
                self.groups.members, self.groups.count, me, tag, self.publishing.keeps)

    cdef void _finish_version(self) noexcept nogil:
        self.begun = False
        self.publishing.end_version(self.reduction.weight)
        self._count_version(self.versioning.running)
        self.versioning.finished()

    cdef void _reduce(self) noexcept nogil:
        if self.protocol.operation == AVERAGE or not self.exchange.shares(self.everyone, self.size):
            Snapshots._reduce(self)
            return
        self.begun = True
        self._describe()
        self.exchange.begin_in_memory(
            self._exchange_number(), True, self.everyone, self.size,
            self.vectors.arrays(self.publishing.copy), self.publishing.lent, False)

    cdef long long _exchange_number(self) noexcept nogil:
        return self.protocol.version + self.data_ops

    cdef char *_source(self) noexcept nogil:
        return self.snapshot if self.publishing.source == SNAPSHOT else self.scratch

    cdef void _publish_average(self) noexcept nogil:
        cdef int operation = self.protocol.operation
        Snapshots._publish_average(self)
        if operation == AVERAGE:
            return
        if operation == SYNC and not self.protocol.joined:
            self.timely += self.publishing.finite
        self._unlock_to_copy()
        if self.publishing.total != 0:
            self.reduction.remember(self.snapshot)
        self.publishing.end_average()
        self._lock_after_copy()

    cdef void _load(self) noexcept nogil:
        self._unlock_to_copy()
        self.publishing.load()
        self._lock_after_copy()
        Snapshots._load(self)

    # The application's part: what it publishes and what it takes back

    cdef void _begin_call(self) noexcept nogil:
        self.done = False
        self._reclaim()
        self.taken_version = self.protocol.version
        self.publishing.begin_call()
        self.versioning.call()

    cdef void _lend(self) noexcept nogil:
        """Publish the vector of a timely call."""
        self._unlock_to_copy()
        self.publishing.lend()
        self._lock_after_copy()

    cdef void _complete_call(self) noexcept nogil:
        """Complete the application's call, timely or not; its version has been executed."""
        if self.publishing.has_mean():
            self.publishing.end_call()
        else:
            self._unlock_to_copy()
            self.publishing.end_call()
            self._lock_after_copy()
        memcpy(self.taken, self.groups.members, self.groups.count * sizeof(int))
        self.taken_count = self.groups.count
        self.taken_weight = self.publishing.total
        self.taken_source = self.versioning.source
        self.timely += self.versioning.timely and self.publishing.finite
        self.done = True
        self.versioning.returns()

    cdef int _publish_between_calls(self) except -1 nogil:
        """Publish the application's vector as soon as no exchange is pending."""
        self.holding = True
        self._reclaim()
        self.versioning.hold()
        self._wait(VECTORS_HELD)
        self._unlock_to_copy()
        self.publishing.publish_between_calls()
        self._lock_after_copy()
        self.holding = False
        return 0

    cdef int _join(self) except -1 nogil:
        """Publish the application's vector, and enter JOIN to take part in others' operations."""
        self._publish_between_calls()
        self.publishing.join()
        self.versioning.release()
        self._begin_operation(JOIN)
        return 0

    # What an exception interrupts

    cdef void _abandon(self) noexcept nogil:
        self._lock_when_copied()
        self._stop_using_vector()
        self.publishing.interrupted(self._drain())
        self._open()
        pthread_mutex_unlock(&self.lock)

    cdef void _stop_using_vector(self) noexcept nogil:
        cdef bint calling = self.publishing.calling
        Snapshots._stop_using_vector(self)
        if calling:
            self.versioning.abandon()
        elif self.protocol.stage == OUTSIDE and self.holding:
            self.versioning.let_go()
        self.holding = False

    cdef int _kept_in(self) noexcept nogil:
        return SNAPSHOT if self.publishing.bypasses_snapshot() else Snapshots._kept_in(self)

    # What callers wait for, and how they report it

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == VECTORS_HELD:
            return self.versioning.vectors == HELD
        if goal == CAUGHT_UP:
            return self.protocol.stage == OUTSIDE and self._next() >= self.protocol.version
        if goal == OPENED:
            return self._is_open()
        if goal == DONE and self.no_progress_thread and self._awaits_device():
            return False
        return Snapshots._reached(self, goal)

    cdef bint _is_calls(self, int goal) noexcept nogil:
        return goal == VECTORS_HELD or Snapshots._is_calls(self, goal)

    cdef void _describe_call(self, long long *answer) noexcept nogil:
        Snapshots._describe_call(self, answer)
        answer[1] = self._next()
        answer[3] = self.publishing.calling

    def _waits_in(self):
        if self.versioning.awaited() >= 0:
            return f"version {self._calls_made()}", [self._drawn()]
        return Snapshots._waits_in(self)

    def _waits_in_call(self):
        cdef int member
        if self.versioning.vectors != RUNNING:
            return f"version {self._calls_made()}", range(self.size)
        running = f"version {self.versioning.running + self.protocol.base}"
        members = [self.groups.members[member] for member in range(self.groups.count)]
        return f"publish() during {running}" if self.holding else running, sorted(members)

    cdef int _drawn(self):
        """Return which rank is drawn to start the version that this one waits for."""
        return drawn(
            self.versioning.seed, self.versioning.awaited() + self.protocol.base, self.size)

    cdef _why_missing_in_call(self, long long *answer, operation, elsewhere):
        if self.versioning.awaited() >= 0:
            return f"{elsewhere}, and drawn to start it"
        if answer[1] > self.versioning.running:
            return None
        # An interrupted call counts as made, though its version is not complete.
        if not (answer[3] or self.versioning.passive
                or answer[0] - self.protocol.base > self.versioning.running):
            return elsewhere
        if answer[1] < self.versioning.running:
            return f"still in version {answer[1] + self.protocol.base}"
        return None

    # What Python calls

    def start(self, vector, weight, Handover handover=None):
        """Begin this rank's next call, a version or a synchronization, and return the `Call`.

        With a handover, the call begins once the device has checked the vector.
        """
        return self._start(CALL, vector, PyBUF_WRITABLE, weight, 0, handover)

    def call(self, vector, weight, Handover handover=None):
        """Average the vector in place in this rank's next version, or over all ranks."""
        return self._carry_out(CALL, vector, PyBUF_WRITABLE, weight, 0, handover).result

    def publish(self, vector, weight):
        """Publish this vector, or its change since the last one, outside of any call."""
        self._carry_out(PUBLISH, vector, 0, weight)

    def start_join(self, vector):
        """Begin to take part in others' operations until all ranks have joined; return the `Call`.
        """
        return self._start(JOIN, vector, PyBUF_WRITABLE, None)

    cdef int _begin(self, int what) except -1 nogil:
        if what == PUBLISH:
            self._publish_between_calls()
            self.versioning.release()
            self.done = True
        elif what == JOIN:
            self._join()
        elif what == CALL and not self.versioning.is_synchronous():
            self._begin_call()
        else:
            self._begin_operation(SYNC if what == CALL else what)
        return 0

    cdef _result(self):
        cdef int k
        cdef long long base = self.protocol.base
        if self.taken_count == 0:
            return Snapshots._result(self)
        group = tuple(sorted([self.taken[k] for k in range(self.taken_count)]))
        timely = self.versioning.timely and self.publishing.finite
        return new_result((self.taken_version + base, timely, self.taken_source + base, group,
                           self.taken_weight, False))

    def _counts(self):
        cdef int staleness, last = 0
        with nogil:
            pthread_mutex_lock(&self.lock)
            self._note_executed(self._next())
            pthread_mutex_unlock(&self.lock)
        for staleness in range(MOST_STALENESS + 1):
            if self.staleness[staleness]:
                last = staleness + 1
        counts = tuple([self.staleness[staleness] for staleness in range(last)])
        return self.versions, self.passive, counts

    @property
    def executed(self):
        """The next version to execute here: the number of versions executed, by any rank's call."""
        return self._next() + self.protocol.base
