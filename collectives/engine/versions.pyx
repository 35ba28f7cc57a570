# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Wait-avoiding averages of groups: the versions that any rank starts, and all execute.

It drives `WaitAvoidingProtocol` and the exchanges. A rank whose application computes takes part
with what it last published, in the progress thread, or in the memory that the ranks of its node share.
"""

from cpython.buffer cimport PyBUF_WRITABLE
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from mpi4py.MPI cimport Comm

from collectives.engine.all_ranks cimport (
    CALL,
    CAUGHT_UP,
    OTHER_GOALS,
    PUBLISH,
    AllRanks,
    Call,
)
from collectives.engine.control_tree cimport ControlTree
from collectives.exchange.clock cimport now
from collectives.exchange.doubling cimport PHASES
from collectives.exchange.mutex cimport (
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.exchange.shared cimport Shared
from collectives.memory.allocation cimport Segment, allocate
from collectives.memory.layout cimport UserVector, weight_of
from collectives.protocols.all_ranks cimport (
    AVERAGE,
    FINISH,
    JOIN,
    OUTSIDE,
    SYNC,
)
from collectives.protocols.groups cimport Groups
from collectives.protocols.wait_avoiding cimport (
    HELD,
    IDLE,
    RUNNING,
    SHARED,
    WaitAvoidingProtocol,
    drawn,
)

from collectives.result import Result
from collectives.topology import activation_peers, propagation_bound

cdef enum:
    VECTORS_HELD = OTHER_GOALS

cdef enum:
    # What a message on the tree begins with where versions are free to start; after how many
    # operations follows.
    FREED = -3


cdef class ActivationTree(ControlTree):
    """The control tree with activations: a version and its ops."""

    cdef void _deliver(self, int k, long long number, long long detail) noexcept nogil:
        if number == FREED:
            self.versioning.free(detail, k)
        else:
            self.versioning.tell(number, detail, k)

    cdef unsigned int _due(self) noexcept nogil:
        return self.versioning.due | self.versioning.freed_due | ControlTree._due(self)

    cdef void _send_one(self, int k) noexcept nogil:
        if self.versioning.due >> k & 1:
            self.versioning.due &= ~(1u << k)
            self._send(k, self.versioning.sent[k], self.versioning.sent_ops[k])
        elif self.versioning.notice_due >> k & 1 or not self.versioning.freed_due >> k & 1:
            ControlTree._send_one(self, k)
        else:
            self.versioning.freed_due &= ~(1u << k)
            self._send(k, FREED, self.versioning.freed)


cdef class GroupVersions(AllRanks):
    """One wait-avoiding group allreduce on this rank: its vectors, versions and application.

    Args:
        control, data, like: see `AllRanks`.
        group_size, sync_period, fixed: of the groups and averages over all.
        passive: whether ranks take part that have not called.
        conserving, summing: what ranks contribute; see `GroupAllreduce` and `PartialAllreduce`.
        drawing_seed: of the ranks drawn, each of which alone may start a version; None: any may.
        sharing: whether to have memory that other ranks can map.
        others: those of `AllRanks`.
    """

    def __init__(self, Comm control, Comm data, like, *, int group_size, sync_period, bint fixed,
                 bint passive, bint conserving, bint summing, drawing_seed, bint sharing, **others):
        cdef UserVector opened
        cdef ActivationTree tree
        AllRanks.__init__(self, control, data, like, **others)
        self.conserving = conserving
        self.summing = summing
        self.groups = Groups(self.rank, self.size, group_size, fixed)
        dimensions = len(activation_peers(self.rank, self.size))
        self.versioning = WaitAvoidingProtocol(dimensions, group_size, sync_period, passive)
        if drawing_seed is not None:
            self.versioning.draw(self.rank, self.size, drawing_seed)
        # Engines drift apart by no more than the bound, so tags further apart are never confused:
        # those of a group do so by one version only, and groups that are fixed have no others.
        self.window = 4 * propagation_bound(self.size, group_size) + 4 if group_size > 1 else 1
        tree = ActivationTree(control, self.versioning, self.window)
        tree.versioning = self.versioning
        self._begin_protocol(self.versioning, tree)
        self._allocate_vectors(sharing)
        self.published_version = -1
        opened = UserVector(like[0] if self.layout.single else like, self.layout, 0)
        self._replace(opened.arrays)
        self._let_count_once()

    @property
    def handle(self):
        """Where other ranks of the node find this one's memory; None if none can be shared."""
        return None if self.shared is None else (<Segment>self.shared.segments[0]).handle

    @property
    def shares(self):
        """Whether this rank and others of its node use each other's memory."""
        return self.shared is not None and self.shared.works

    def map(self, handles):
        """Map the memory of the node's ranks, a dict from them to their handles; OSError if not."""
        self.shared.map(handles)

    def share(self):
        """Exchange vectors in the memory that all ranks of the node have mapped."""
        self.shared.use()

    def compress_from_initial(self):
        """All ranks have the same initial vector: compressed ones are told from it."""
        self.reduction.remember(self.snapshot)

    def listen(self):
        AllRanks.listen(self)
        self.versioning.shares = (
            self.shared is not None and self.shared.works and self.versioning.passive
            and self.versioning.exchanges)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self._renumber()
            self.versioning.run()
            self._open()
            pthread_mutex_unlock(&self.lock)

    def __dealloc__(self):
        free(self.memory)
        free(self.taken)
        free(self.snapshot_arrays)

    cdef int _allocate_vectors(self, bint sharing) except -1:
        """Snapshot and result vector, in one piece of memory, which other ranks can map."""
        cdef Py_ssize_t vector = self.layout.size
        cdef char *result
        cdef int count = self.layout.count
        self.taken = <int *>calloc(self.size, sizeof(int))
        self.snapshot_arrays = <char **>calloc(2 * count, sizeof(char *))
        if self.taken == NULL or self.snapshot_arrays == NULL:
            raise MemoryError
        self.result_arrays = self.snapshot_arrays + count
        if sharing:
            self._make_shared()
        if self.shared is not None:
            self.snapshot = self.shared.snapshot(self.rank)
            result = self.shared.result(self.rank)
        else:
            self.memory = allocate(2 * vector)
            memset(self.memory, 0, 2 * vector)
            self.snapshot = self.memory
            result = self.memory + vector
        self.layout.locate(self.snapshot_arrays, self.snapshot)
        self.layout.locate(self.result_arrays, result)
        return 0

    def _make_shared(self):
        """Make the memory for what this rank shares, unless the system has none that can be."""
        try:
            self.shared = Shared(
                self.reduction, self.groups, self.size, rings=not self.versioning.passive)
            self.exchange.shared = self.shared
        except (AttributeError, OSError) as error:  # memfd_create is Linux's
            self.not_shared = f"rank {self.rank} has no memory to share: {error}"

    # Progress

    cdef void _advance(self) noexcept nogil:
        if self.versioning.vectors == SHARED:
            self._execute_shared()
        AllRanks._advance(self)
        self._open()

    cdef bint _is_busy(self) noexcept nogil:
        return (AllRanks._is_busy(self) or self.versioning.due != 0 or self.calling
                or self._is_behind())

    cdef bint _step(self) noexcept nogil:
        """Take the running version, or else the application, one step on; return whether it did."""
        if self.versioning.vectors == RUNNING:
            if not self.begun:
                self._begin_version()
            if not self.exchange.progress():
                return False
            self._finish_version()
        elif self.copying:
            return False
        elif not self.calling:
            return AllRanks._step(self)
        elif self.versioning.vectors != HELD:
            return False
        elif self.versioning.timely and not self.published:
            self._lend_unlocked()
            self.versioning.published()
        else:
            self._complete_call()
        self.reduction.progress_count += 1
        return True

    cdef void _before_operation(self) noexcept nogil:
        self._reclaim()

    # Vectors that other ranks may use

    cdef void _open(self) noexcept nogil:
        """Let other ranks execute versions for this one, where the protocol wants that."""
        if self.versioning.vectors != SHARED or self.opened:
            return
        self.opened = True
        self.opened_for = self.versioning.next
        self._describe(self.conserving, self.conserving and self.unchanged)
        self.shared.open(self.versioning.next + self.data_ops)

    cdef void _reclaim(self) noexcept nogil:
        """Let others begin nothing more, and learn what has become of the vectors."""
        cdef bint running = False
        if self.versioning.vectors != SHARED:
            return
        if self.opened:
            self.opened = False
            running = self.shared.close()
            self._note_executed(self.shared.number - self.data_ops)
            if self.versioning.next > self.opened_for:
                self.groups.find(self.versioning.next - 1 + self.protocol.base)
                self.weight = self.shared.parts[self.rank].total
                if self.shared.parts[self.rank].replaced:
                    self.filled = True
                    self.unchanged = False
        self.versioning.reclaim(running)
        if running:
            self.begun = True
            self.groups.find(self.versioning.running + self.protocol.base)
            self.exchange.resume_in_memory(
                self.snapshot_arrays if self.conserving else self.result_arrays)

    cdef void _note_executed(self, long long end) noexcept nogil:
        """Others have executed every version before this one."""
        cdef long long version
        for version in range(self.versioning.next, end):
            self._count_version(version)
        self.versioning.executed(end)

    cdef void _execute_shared(self) noexcept nogil:
        """Execute a version that has been started and that nobody has executed for this rank."""
        cdef long long number
        if not self.opened:
            return
        # Read once: others may go on to a version that nobody has started.
        number = self.shared.reached()
        if not self._is_started(number - self.data_ops):
            return
        if self.shared.needs_messages(number):
            self._reclaim()
            if self.versioning.vectors == IDLE:
                self.versioning.execute()
        elif self.shared.help(self.rank, number):
            self.reduction.progress_count += 1

    cdef bint _is_behind(self) noexcept nogil:
        """Whether a version has been started that shared vectors are still to be used for."""
        return self.opened and self._is_started(self._next())

    cdef bint _is_started(self, long long version) noexcept nogil:
        """Whether a version has been started that may be executed now."""
        return version <= self.versioning.told and self.versioning.told_ops <= self.protocol.ops

    cdef long long _next(self) noexcept nogil:
        """The next version to be executed for this rank."""
        if self.opened:
            return self.shared.reached() - self.data_ops
        return self.versioning.next

    cdef void _describe(self, bint in_place, bint saves) noexcept nogil:
        """Tell other ranks of the node what is to become of this rank's vectors."""
        self.shared.describe(in_place, saves, self._weight_after())

    cdef double _weight_after(self) noexcept nogil:
        """The weight of a mean that replaces the snapshot."""
        if self.versioning.passive:
            return 0 if self.out else self.weight_published
        return weight_of(self.snapshot)[0] if self.protocol.joined else 0

    cdef void _let_count_once(self) noexcept nogil:
        """Where nobody is passive what has been averaged counts no more, but for who has joined."""
        if not (self.versioning.passive or self.protocol.joined):
            self._set_weight(0)

    cdef void _renumber(self) noexcept nogil:
        """Let exchanges be numbered on from the last operation."""
        if self.shared is not None:
            self.shared.oldest = self.protocol.t + self.data_ops
            self.shared.shift = self.protocol.base - self.data_ops

    # Versions and averages over all ranks

    cdef void _begin_version(self) noexcept nogil:
        cdef long long version = self.versioning.running
        cdef int me = self.groups.find(version + self.protocol.base)
        cdef int tag = <int>(version % self.window) * PHASES
        cdef bint timely = self.calling and self.published and self.versioning.timely
        cdef bint bypasses = self._bypasses_snapshot()
        cdef char **target = self.x if timely else self.result_arrays
        cdef char **copy = NULL
        cdef char **saved = NULL
        self.begun = True
        self.rhythm.beat(now())
        if self.exchange.shares(self.groups.members, self.groups.count):
            self._describe(self.conserving and not bypasses,
                           self.conserving and self.unchanged and not timely)
            self.exchange.begin_in_memory(
                version + self.data_ops, False, self.groups.members, self.groups.count,
                self.x if timely else NULL, self.lent, bypasses,
                self.snapshot_arrays if self.conserving else self.result_arrays, NULL)
            return
        if self.conserving:
            target = self.x if timely else self.snapshot_arrays
            copy = self.snapshot_arrays if timely and not bypasses else NULL
            saved = self.result_arrays if self.unchanged and not timely else NULL
        self.exchange.begin(self.groups.members, self.groups.count, me, tag,
                            self.snapshot, self.x, self.lent, not (self.conserving or bypasses),
                            target, copy, saved)

    cdef bint _bypasses_snapshot(self) noexcept nogil:
        """Whether a version goes from the application's memory back there, and no copy is kept.

        Where nobody is passive none is needed, unless an exception ends the call meanwhile.
        """
        return self.lent and self.calling and not self.versioning.passive

    cdef void _finish_version(self) noexcept nogil:
        cdef bint bypassed = self._bypasses_snapshot()
        self._end_exchange()
        self._count_version(self.versioning.running)
        if bypassed:
            self._note_snapshot(False)
        elif self.conserving and self.weight != 0:
            self.filled = True
            self.unchanged = False
            self._set_weight(self._weight_after())
        else:
            self._let_count_once()
        self.versioning.finished()

    cdef void _count_version(self, long long version) noexcept nogil:
        cdef long long staleness = version - self.published_version
        self.versions += 1
        self.passive += staleness != 0
        self.staleness[min(staleness, MOST_STALENESS)] += 1

    cdef void _begin_reducing(self) noexcept nogil:
        if self.protocol.operation == AVERAGE:
            AllRanks._begin_reducing(self)
            return
        if self.has_x and not self.protocol.joined:
            self._lend_unlocked()
        if self._is_finishing() and self.joined_at == self.protocol.t and self.finite:
            # Nobody has made more steps: what this rank has counts.
            self._set_weight(self.weight_published)
        self.gives = self.filled
        self._reduce()

    cdef void _reduce(self) noexcept nogil:
        """Begin the exchange of an average that is published."""
        cdef bint publishes = self.has_x and not self.protocol.joined
        cdef char **copy = self.x if publishes or self._is_finishing() else NULL
        cdef char **saved = NULL
        if self.protocol.operation == AVERAGE:
            AllRanks._reduce(self)
            return
        self.begun = True
        if not publishes and self.unchanged:
            saved = self.result_arrays
        if self.exchange.shares(self.everyone, self.size):
            self._describe(True, saved != NULL)
            self.exchange.begin_in_memory(
                self.protocol.t + self.data_ops, True, self.everyone, self.size,
                copy, self.lent, False, self.snapshot_arrays, copy)
            return
        self.exchange.begin(self.everyone, self.size, self.rank, self._tag(), self.snapshot,
                            self.x, self.lent, False, self.snapshot_arrays, copy, saved)

    cdef void _give_equally(self) noexcept nogil:
        if self.protocol.operation == AVERAGE:
            AllRanks._give_equally(self)
        else:
            self._set_weight(self.gives)

    cdef void _end_exchange(self) noexcept nogil:
        self.begun = False
        self.weight = self.reduction.weight
        if (self.lent and self.weight == 0 and self.protocol.operation != AVERAGE
                and not self._bypasses_snapshot()):
            self.layout.copy(self.snapshot_arrays, self.x)
        self.lent = False

    cdef void _publish_average(self) noexcept nogil:
        cdef int operation = self.protocol.operation
        AllRanks._publish_average(self)
        if operation == AVERAGE:
            return
        if operation == SYNC and not self.protocol.joined:
            self.calls += 1
            self.timely += self.finite
        self.published_version = self.protocol.t - (operation != SYNC)
        # What a rank that has joined had not yet shared is in this average.
        self.out = self.protocol.joined and operation != FINISH
        if self.weight != 0:
            self._unlock_to_copy()
            self.reduction.remember(self.snapshot)
            self._lock_after_copy()
            self.filled = True
            self.unchanged = self.reduction.copy != NULL
            self.unreturned = self.unreturned and not self.unchanged
            self._set_weight(0 if self.out else self.weight_published)
        if self.summing:
            self._unlock_to_copy()
            self.layout.zero(self.snapshot_arrays)
            self._lock_after_copy()

    cdef void _after_operation(self, bint averages) noexcept nogil:
        self.published = False
        if not averages:
            self._let_count_once()

    cdef void _load(self) noexcept nogil:
        if self.has_x:
            self._unlock_to_copy()
            self._replace(self.x)
            self._lock_after_copy()
        self.published_version = self.protocol.t - 1
        AllRanks._load(self)

    # The application's part: what it publishes and what it takes back

    cdef void _begin_call(self) noexcept nogil:
        self.done = False
        self._reclaim()
        self.taken_version = self.protocol.t
        self.calling = True
        self.versioning.call()

    cdef void _complete_call(self) noexcept nogil:
        """The version that the call waited for has been executed, timely or not: return."""
        if not self.versioning.timely:
            self._publish_unlocked()
        if self.conserving:
            self._return_snapshot()
        elif not self.versioning.timely:
            self._absorb_late()
        memcpy(self.taken, self.groups.members, self.groups.count * sizeof(int))
        self.taken_count = self.groups.count
        self.taken_weight = self.weight
        self.taken_source = self.versioning.source
        self.calls += 1
        self.timely += self.versioning.timely and self.finite
        self.calling = False
        self.published = False
        self.done = True
        self.versioning.returns()

    cdef void _publish_unlocked(self) noexcept nogil:
        self._unlock_to_copy()
        self._publish(self.x)
        self._lock_after_copy()
        self.published = True
        self.published_version = self.protocol.t

    cdef void _lend_unlocked(self) noexcept nogil:
        """Publish for an exchange that begins at once, without a copy where it needs none."""
        cdef bint replaces = not self.conserving or not self.filled or self.unchanged
        cdef bint finite = False
        if replaces:
            self._unlock_to_copy()
            finite = self.layout.all_finite(self.x)
            self._lock_after_copy()
        if not finite:
            self._publish_unlocked()
            return
        self.lent = True
        self.finite = True
        self.weight_published = self.weight_given
        self._note_snapshot(True)
        self.published = True
        self.published_version = self.protocol.t

    cdef void _set_weight(self, double weight) noexcept nogil:
        weight_of(self.snapshot)[0] = weight

    cdef void _note_snapshot(self, bint filled) noexcept nogil:
        """The snapshot is what the application has, or else nothing that counts."""
        self._set_weight(self.weight_given if filled else 0)
        self.filled = filled
        self.unchanged = filled
        self.unreturned = not filled

    cdef void _replace(self, char **x) noexcept nogil:
        """Make this vector what the rank contributes, with weight 0 and zeroed if not finite."""
        self.finite = self.layout.all_finite(x)
        if self.finite:
            self.layout.copy(self.snapshot_arrays, x)
        else:
            self.nonfinite += 1
            self.layout.zero(self.snapshot_arrays)
        self.weight_published = self.weight_given
        self._note_snapshot(self.finite)

    cdef void _publish(self, char **x) noexcept nogil:
        """Publish: the vector itself (paper), or what the application changed (conserving).

        While the snapshot is `unchanged` since it was returned, adding the change gives x exactly.
        """
        if not self.conserving or not self.filled:
            self._replace(x)
            return
        if self.unreturned:
            self.finite = False
        elif self.unchanged:
            self.finite = self.layout.all_finite(x)
            if self.finite:
                self.layout.copy(self.snapshot_arrays, x)
        else:
            self.finite = self.layout.finite_change(self.snapshot_arrays, x, self.result_arrays)
            if self.finite:
                self.layout.add_change(
                    self.snapshot_arrays, self.snapshot_arrays, x, self.result_arrays)
        if self.finite:
            self.weight_published = self.weight_given
            self._set_weight(self.weight_given)
        else:
            self.nonfinite += 1

    cdef void _return_snapshot(self) noexcept nogil:
        """Return the snapshot, unless nobody has contributed; a timely call has it already."""
        if not self.filled:
            return
        if not self.versioning.timely or self.weight == 0:
            self._unlock_to_copy()
            self.layout.copy(self.x, self.snapshot_arrays)
            self._lock_after_copy()
        self.unchanged = True
        self.unreturned = False

    cdef void _absorb_late(self) noexcept nogil:
        """Late under the paper's rule: x = (W·m + w·x') / (W + w), or m if x' is not finite.

        And m where x' is a sum, of which some is in m already.
        """
        cdef double own = self.weight_given if self.finite and not self.summing else 0
        if self.weight == 0:
            return
        self._unlock_to_copy()
        if own == 0:
            self.layout.copy(self.x, self.result_arrays)
        else:
            self.layout.combine(self.x, own / (self.weight + own),
                                self.result_arrays, self.weight / (self.weight + own))
        self._lock_after_copy()

    cdef void _contribute_to_average(self, bint publishes) noexcept nogil:
        """Fill the scratch vector with what a synchronization would take from this rank now.

        Where that is the application's vector, lend it: the scratch then takes no memory.
        The cases are those of `_publish`. A sum is none of an average of something else.
        """
        cdef double weight = self.weight_given
        cdef bint replaces = not self.conserving or not self.filled
        self.gives = True
        self.gives_own = False
        self._unlock_to_copy()
        if publishes and (replaces or self.unchanged) and self.layout.all_finite(self.x):
            self.lent = True
            self.gives_own = True
        elif replaces and (publishes or self.summing):
            self.layout.zero(self.scratch_arrays)
            self.gives = False
            weight = 0
        elif (publishes and not self.unreturned and not self.unchanged
                and self.layout.finite_change(self.snapshot_arrays, self.x, self.result_arrays)):
            self.layout.add_change(
                self.scratch_arrays, self.snapshot_arrays, self.x, self.result_arrays)
        else:
            self.layout.copy(self.scratch_arrays, self.snapshot_arrays)
            self.gives = self.filled
            weight = weight_of(self.snapshot)[0]
        weight_of(self.scratch)[0] = weight
        self._lock_after_copy()

    cdef int _publish_between_calls(self) except -1 nogil:
        """Publish as soon as no exchange is under way."""
        self.holding = True
        self._reclaim()
        self.versioning.hold()
        self._wait(VECTORS_HELD)
        self._unlock_to_copy()
        self._publish_between(self.x)
        self._lock_after_copy()
        self.published_version = self.protocol.t
        self.holding = False
        return 0

    cdef void _publish_between(self, char **x) noexcept nogil:
        """Publish, and remember the vector as what the application goes on from."""
        cdef bint remembers = self.conserving and not (self.unchanged or self.unreturned)
        self._publish(x)
        if remembers and self.finite:
            self.layout.copy(self.result_arrays, x)

    cdef int _join(self) except -1 nogil:
        """Share what the application has, and enter what the others do."""
        self._publish_between_calls()
        self.joined_at = self.protocol.t
        if not (self.conserving or self.summing):
            # Under other rules what was not yet shared goes into the next synchronization first.
            self._set_weight(0)
        self.versioning.release()
        self._begin_operation(JOIN)
        return 0

    # What an exception interrupts

    cdef void _abandon(self) noexcept nogil:
        """The call was interrupted by an exception: the user's vector is ours no longer."""
        cdef bint shares, ended
        cdef char **kept
        cdef char **target = self.snapshot_arrays if self.conserving else self.result_arrays
        self._lock_when_copied()
        # All that the application has changed is published then; x is what it goes on from.
        shares = self.conserving and (self.published or self._is_finishing() and self.begun)
        kept = self.snapshot_arrays if self._bypasses_snapshot() else NULL
        if self.begun:
            self.exchange.adopt(kept)
        elif self.lent:
            # Its version has not been started.
            self.layout.copy(self.snapshot_arrays, self.x)
        elif self._is_averaging() and not self.versioning.passive:
            # The operation goes on with what there is, and that would be nothing.
            if self.protocol.operation == AVERAGE:
                self._contribute_ahead()
            else:
                self._publish_between(self.x)
        if self.protocol.operation == AVERAGE:
            target = self.scratch_arrays
        self._keep_nothing_lent(target)
        if shares:
            self.reduction.saved = NULL
            self.unchanged = False
        self.published = False
        if self.calling:
            self.versioning.abandon()
        elif self.protocol.stage == OUTSIDE and self.holding:
            self.versioning.waiting = False
            if self.versioning.vectors == HELD:
                self.versioning.release()
        self.calling = False
        self.holding = False
        ended = self._drain()
        if shares:
            self.layout.copy(self.result_arrays, self.x)
            self.unreturned = self.unreturned or not ended
        self._open()
        pthread_mutex_unlock(&self.lock)

    # What callers wait for, and say of it

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == VECTORS_HELD:
            return self.versioning.vectors == HELD
        if goal == CAUGHT_UP:
            return self.protocol.stage == OUTSIDE and self._next() >= self.protocol.t
        return AllRanks._reached(self, goal)

    cdef bint _is_calls(self, int goal) noexcept nogil:
        return goal == VECTORS_HELD or AllRanks._is_calls(self, goal)

    cdef void _describe_call(self, long long *answer) noexcept nogil:
        AllRanks._describe_call(self, answer)
        answer[1] = self._next()
        answer[3] = self.calling

    def _waits_in(self):
        if self.versioning.awaited() >= 0:
            return f"version {self._calls_made()}", [self._drawn()]
        return AllRanks._waits_in(self)

    def _waits_in_call(self):
        cdef int member
        if self.versioning.vectors != RUNNING:
            return f"version {self._calls_made()}", range(self.size)
        running = f"version {self.versioning.running + self.protocol.base}"
        members = [self.groups.members[member] for member in range(self.groups.count)]
        return f"publish() during {running}" if self.holding else running, sorted(members)

    cdef int _drawn(self):
        """Return which rank is drawn to start what this one waits for."""
        return drawn(
            self.versioning.seed, self.versioning.awaited() + self.protocol.base, self.size)

    cdef _why_missing_in_call(self, long long *answer, operation, elsewhere):
        if self.versioning.awaited() >= 0:
            return f"{elsewhere}, and drawn to start it"
        if answer[1] > self.versioning.running:
            return None
        # An interrupted call has been made, though its version is not over.
        if not (answer[3] or self.versioning.passive
                or answer[0] - self.protocol.base > self.versioning.running):
            return elsewhere
        if answer[1] < self.versioning.running:
            return f"still in version {answer[1] + self.protocol.base}"
        return None

    # What Python calls

    def start(self, vector, weight):
        """Begin this rank's next call, a version or a synchronization, and return the `Call`."""
        return self._start(CALL, vector, PyBUF_WRITABLE, weight)

    def call(self, vector, weight):
        """Average the vector in place in this rank's next version, or over all ranks."""
        return self._carry_out(CALL, vector, PyBUF_WRITABLE, weight).result

    def publish(self, vector, weight):
        """Contribute this vector, or its change since the last, while this rank is late."""
        self._carry_out(PUBLISH, vector, 0, weight)

    def start_join(self, vector):
        """Begin to take part in what the others do until all have joined, and return the `Call`."""
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

    def _result(self):
        cdef int k
        cdef long long base = self.protocol.base
        if self.taken_count == 0:
            return AllRanks._result(self)
        group = tuple(sorted([self.taken[k] for k in range(self.taken_count)]))
        timely = self.versioning.timely and self.finite
        return Result(self.taken_version + base, timely, self.taken_source + base, group,
                      self.taken_weight, False)

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
        """Number of the next version to be executed here: how many have been, by anybody's call."""
        return self._next() + self.protocol.base
