"""Wait-avoiding group averages: versions that any rank starts, and all ranks execute.

A rank that is computing takes part with its snapshot, by its progress thread or in the memory shared
by the ranks of its node.
"""

from cpython.buffer cimport PyBUF_WRITABLE
from mpi4py.MPI cimport Comm

from collectives.engine.activation_tree cimport ActivationTree
from collectives.engine.collective cimport NativeCollective
from collectives.engine.calls cimport (
    CALL,
    DONE,
    OTHER_GOALS,
    OTHER_WISHES,
    PUBLISH,
    Call,
    new_result,
)
from collectives.engine.ports cimport MOST_STALENESS, VersionsPort
from collectives.engine.tags cimport versions_window
from collectives.exchange.shared.shared cimport Shared
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport Handover
from collectives.protocols.all_ranks cimport JOIN, SAVE, SYNC
from collectives.protocols.contribution cimport KEPT, RESULT, SNAPSHOT, X
from collectives.protocols.groups cimport Groups
from collectives.protocols.own_pace cimport OwnPaceProtocol
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.versions cimport (
    FETCHING,
    JOINING,
    LEASING,
    PUBLISHING,
    REBASING,
    VersionsProtocol,
)
from collectives.protocols.wait_avoiding cimport RUNNING, WaitAvoidingProtocol, drawn

from collectives.protocols.late_rules import late_rule
from collectives.topology import propagation_bound

cdef enum:
    OPENED = OTHER_GOALS
    # What the application requests, besides CALL and PUBLISH.
    FETCH = OTHER_WISHES
    REBASE
    LEASE

cdef class GroupVersions(NativeCollective):
    """One wait-avoiding group allreduce on this rank: its vectors, versions and application.

    Args:
        control, data, like: see `Driver`.
        group_size, sync_period, fixed: the groups' size, versions from one average over all ranks
            to the next, and whether the groups are the same in all versions.
        own_pace: whether ranks make any number of calls: see `protocols.own_pace`. Then the weight
            of a call is its work, which is counted: see `protocols.job_count`.
        keep_average: whether to keep the newest average over all ranks. Other ranks then execute no
            versions for this one.
        passive: whether ranks take part in a version before their application calls.
        late: the name of the late rule: see `late_rules`.
        weighing: the vectors' weights, as `settings.weighing` returns them.
        array_periods: of each array, the versions from one that averages it to the next: see
            `settings.periods_of`.
        drawing_seed: seed for drawing the one rank that may start each version; None: any may.
        leased: the first of the arrays of which ranks have parts that expire, and the one after the
            last; None: there are none. See `protocols.lease`.
        initial: the vector that `like` is a copy of, if it is in other memory; None: `like`.
        others: the other arguments of `Driver`.
    """

    def __init__(self, Comm control, Comm data, like, *, int group_size, sync_period, bint fixed,
                 bint own_pace, bint keep_average, bint passive, late, weighing, drawing_seed,
                 array_periods, leased=None, initial=None, **others):
        cdef UserVector opened
        cdef ActivationTree tree
        cdef int window
        NativeCollective.__init__(self, control, data, like, **others)
        self.groups = Groups(
            self.rank, self.size, group_size, fixed, sync_period if own_pace else 0, array_periods)
        kind = OwnPaceProtocol if own_pace else WaitAvoidingProtocol
        self.versions = kind(self.dimensions, group_size, sync_period, passive)
        if drawing_seed is not None:
            self.versions.draw(self.rank, self.size, drawing_seed)
        window = 1
        if group_size > 1:
            window = versions_window(propagation_bound(self.size, group_size))
        tree = ActivationTree(control, self.versions)
        tree.versions = self.versions
        self.publishing = SnapshotProtocol(self.vectors, self.versions, late_rule(late))
        self.publishing.keeps_average = keep_average
        self.versions_port = VersionsPort(
            self.exchange, self.vectors, self.publishing, self.rank, self.size,
            groups=self.groups, window=window, rhythm=self.rhythm)
        self.versions_port.waiting_callers = &self.waiting_callers
        self.version_steps = VersionsProtocol(self.versions, self.publishing)
        self.drive(self.version_steps, self.versions_port, tree, weighing)
        self._allocate_vectors(leased)
        if initial is None:
            initial = like[0] if self.layout.single else like
        opened = UserVector(initial, self.layout, 0)
        self.vectors.of[X] = opened.arrays
        self.publishing.replace()
        self.publishing.count_once()

    cdef int _allocate_vectors(self, leased) except -1:
        """Allocate snapshot and result vector as one, which other ranks can map if they share it.
        """
        # On devices all averages are in shared memory: see `EnginePort`.
        cdef Shared shared = self.node.share(
            self.exchange, True, not self.versions.passive or self.layout.space.deferred,
            self.groups)
        if shared is None:
            self.vectors.allocate(SNAPSHOT, 2)
        else:
            self.vectors.place(SNAPSHOT, shared.memory.snapshot(self.rank))
            self.vectors.place(RESULT, shared.memory.result(self.rank))
            self.vectors.swapped = &shared.part.swapped
        if self.publishing.keeps_average:
            self.vectors.allocate(KEPT, 1)
        if leased is not None:
            self.vectors.have_part(leased[0], leased[1])
            self.publishing.lease.begin(self.versions.sync_period)
        if shared is None or self.layout.space.deferred:  # a shared segment is zero
            for vector in (SNAPSHOT, RESULT):
                self.layout.space.zero(self.vectors.start[vector], self.layout.size)
        return 0

    def compress_from_initial(self):
        """Send compressed vectors as differences from the initial one, which all ranks have."""
        self.versions_port.remember()

    def listen(self):
        NativeCollective.listen(self)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.version_steps.begin(self.node.in_use and not self.publishing.keeps_average)
            self.waiter.wait(self, OPENED)
            pthread_mutex_unlock(&self.lock)

    # Progress

    cdef void advance(self) noexcept nogil:
        NativeCollective.advance(self)
        if self.exchange.shared is not None:
            self.exchange.shared.steps.end_blocks()

    cdef bint is_busy(self) noexcept nogil:
        return NativeCollective.is_busy(self) or self._awaits_device()

    cdef bint _awaits_device(self) noexcept nogil:
        """Return whether other ranks wait for what a device still does for this one."""
        return not self.version_steps.is_open() or self.versions_port.awaits_device()

    # What callers wait for, and how they report it

    cdef bint reached(self, int goal) noexcept nogil:
        if goal == OPENED:
            return self.version_steps.is_open()
        if goal == DONE and self.no_progress_thread and self._awaits_device():
            return False
        return NativeCollective.reached(self, goal)

    cdef bint is_joining(self) noexcept nogil:
        return NativeCollective.is_joining(self) or self.version_steps.is_joining()

    cdef long long calls_made(self) noexcept nogil:
        if self.versions.own_pace:
            return self.versions.calls
        return NativeCollective.calls_made(self)

    cdef void describe_call(self, long long *answer) noexcept nogil:
        NativeCollective.describe_call(self, answer)
        answer[1] = self.version_steps.next_version()
        answer[3] = self.publishing.calling

    def _waits_in(self):
        if self.versions.awaited() >= 0:
            return self._next_call(), [self._drawn()]
        return NativeCollective._waits_in(self)

    def _waits_in_call(self):
        cdef int member
        if self.versions.vectors != RUNNING:
            return self._next_call(), range(self.size)
        running = f"version {self.versions.running + self.protocol.base}"
        members = {self.groups.members[member] for member in range(self.groups.count)}
        if self.exchange.shared is not None and self.exchange.shared.slots is not None:
            members |= self.exchange.shared.slots.readers()
        if self.version_steps.holding:
            running = f"{self._between_calls()} during {running}"
        return running, sorted(members)

    cdef str _between_calls(self):
        """Return what the application does between two calls."""
        if self.version_steps.purpose == FETCHING:
            return "last_average()"
        if self.version_steps.purpose == LEASING:
            return "lease()"
        return "load()" if self.version_steps.purpose == REBASING else "publish()"

    cdef str _next_call(self):
        return f"version {self.versions.version + self.protocol.base}"

    cdef int _drawn(self):
        """Return which rank is drawn to start the version that this one waits for."""
        return drawn(
            self.versions.seed, self.versions.awaited() + self.protocol.base, self.size)

    cdef why_missing_in_call(self, long long *answer, operation, elsewhere):
        if self.versions.awaited() >= 0:
            return f"{elsewhere}, and drawn to start it"
        if answer[1] > self.versions.running:
            return None
        # An interrupted call counts as made, though its version is not complete.
        if not (answer[3] or self.versions.passive
                or answer[0] - self.protocol.base > self.versions.running):
            return elsewhere
        if answer[1] < self.versions.running:
            return f"still in version {answer[1] + self.protocol.base}"
        return None

    # What Python calls

    def start(self, vector, weight, Handover handover=None):
        """Begin this rank's next call, a version or a synchronization, and return the `Call`.

        With a handover, the call begins once the device has checked the vector.
        """
        return self.caller.start(self, CALL, vector, PyBUF_WRITABLE, weight, 0, handover)

    def call(self, vector, weight, Handover handover=None):
        """Average the vector in place in this rank's next version, or over all ranks."""
        return self.caller.carry_out(
            self, CALL, vector, PyBUF_WRITABLE, weight, 0, handover).result

    def publish(self, vector, weight):
        """Publish this vector, or its change since the last one, outside of any call."""
        self.caller.carry_out(self, PUBLISH, vector, 0, weight)

    def fetch_kept(self, vector):
        """Overwrite this vector by the average over all ranks that is kept.

        Return its version and the mean of all ranks' counts then; None if there is none yet.
        """
        if self.publishing.kept_version < 0:
            return None
        self.caller.carry_out(self, FETCH, vector, PyBUF_WRITABLE)
        return self.publishing.fetched_version, self.publishing.fetched_count

    def save(self, vector):
        """Overwrite this vector by the rank's snapshot; all ranks do, before the version returned.
        """
        self.caller.carry_out(self, SAVE, vector, PyBUF_WRITABLE)
        return self.publishing.fetched_version

    def rebase(self, vector):
        """Continue from this vector with the snapshot that was loaded."""
        self.caller.carry_out(self, REBASE, vector, 0)

    def lease(self, vector):
        """Take the leased arrays of this vector as the rank's part of them."""
        self.caller.carry_out(self, LEASE, vector, 0)

    def load(self, vector, long long version, double count=0):
        """Continue from this vector, and make this version the next one, with this count."""
        self.publishing.loaded_count = count
        NativeCollective.load(self, vector, version)

    @property
    def mean_count(self):
        """The mean of all ranks' counts in the newest average over all ranks, as of the last call.
        """
        return self.publishing.job.told

    def start_join(self, vector):
        """Begin to take part in others' operations until all ranks have joined; return the `Call`.
        """
        return self.caller.start(self, JOIN, vector, PyBUF_WRITABLE, None)

    cdef int begin(self, int what) except -1 nogil:
        if what == PUBLISH or what == JOIN:
            self.version_steps.hold(JOINING if what == JOIN else PUBLISHING)
        elif what == FETCH:
            self.version_steps.hold(FETCHING)
        elif what == REBASE:
            self.version_steps.hold(REBASING)
        elif what == LEASE:
            self.version_steps.hold(LEASING)
        elif what == CALL and not self.versions.is_synchronous():
            self.version_steps.call()
        else:
            self.enter_operation(SYNC if what == CALL else what)
        return 0

    cdef result(self):
        cdef int k
        cdef long long base = self.protocol.base
        if not self.version_steps.in_group:
            return NativeCollective.result(self)
        group = tuple(sorted(
            [self.versions_port.members[k] for k in range(self.versions_port.count)]))
        timely = self.versions.timely and self.publishing.finite
        return new_result(
            (self.version_steps.called + base, timely, self.version_steps.source + base, group,
             self.version_steps.weight, False))

    cdef counts(self):
        cdef int staleness, last = 0
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.version_steps.note_executed(self.version_steps.next_version())
            pthread_mutex_unlock(&self.lock)
        for staleness in range(MOST_STALENESS + 1):
            if self.versions_port.staleness[staleness]:
                last = staleness + 1
        counts = tuple([self.versions_port.staleness[staleness] for staleness in range(last)])
        return self.versions_port.executions, self.versions_port.passive, counts

    @property
    def executed(self):
        """The next version to execute here: the number of versions executed, by any rank's call."""
        return self.version_steps.next_version() + self.protocol.base
