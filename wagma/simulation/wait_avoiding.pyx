"""WAGMA-SGD in simulated time: the engine's protocol, driven by events instead of MPI.

Where the engine reacts to messages and completed exchanges, this driver reacts at the times that the
machine's model gives; all decisions are those of `collectives.protocols.versions`.
"""

import numpy as np

from collectives.protocols.late_rules import late_rule
from collectives.topology import activation_peers, propagation_bound

from collectives.protocols.all_ranks cimport SYNC, TreePort
from collectives.protocols.contribution cimport NOWHERE, Vectors
from collectives.protocols.groups cimport Groups
from collectives.protocols.rank cimport CONTRIBUTE, RETURN
from collectives.protocols.rank_port cimport RankPort
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.versions cimport PUBLISH, VersionsProtocol
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol
from wagma.simulation.core cimport Method, placed_allreduce_time

# Events: an activation has arrived; a pass over vectors has ended; a member is ready to exchange; a
# rank has the mean of its group, or of all ranks; all ranks have agreed on a synchronization.
cdef enum:
    ACTIVATED
    PASSED
    READY
    EXCHANGED
    AGREED

cdef enum:
    # Bytes of an activation, and of a rank's record in the agreement on an operation.
    ACTIVATION = 16


cdef class SimulatedTree(TreePort):
    """Sends one rank's activations."""

    cdef GroupAveraging method
    cdef int rank

    def __init__(self, GroupAveraging method, int rank):
        self.method, self.rank = method, rank

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        with gil:
            self.method.simulation.send(
                self.rank, self.method.peers[self.rank, dimension], ACTIVATION, ACTIVATED,
                version, ops << 8 | dimension)


cdef class WrittenVectors(Vectors):
    """A simulated rank's vectors, which have no values: each pass that writes one takes time.

    Attributes:
        passes: how many passes have written one.
    """

    cdef int passes

    cdef void copy(self, int to, int source) noexcept nogil:
        self.passes += 1

    cdef void zero(self, int vector) noexcept nogil:
        self.passes += 1

    cdef bint all_finite(self, int vector) noexcept nogil:
        return True

    cdef bint is_change_finite(self) noexcept nogil:
        return True

    cdef void add_change(self, int to) noexcept nogil:
        self.passes += 1

    cdef void absorb(self, double own, double total) noexcept nogil:
        self.passes += 1


cdef class SimulatedPort(RankPort):
    """Executes one rank's steps, each of which takes the time that the machine's model gives.

    Attributes:
        publishing, vectors: the rank's.
        exchanged: whether its exchange is complete.
        copies_after: seconds that it needs after an exchange to copy its mean, or what that
            replaces.
    """

    cdef GroupAveraging method
    cdef int rank
    cdef SnapshotProtocol publishing
    cdef WrittenVectors vectors
    cdef bint exchanged
    cdef double copies_after

    def __init__(self, GroupAveraging method, int rank, SnapshotProtocol publishing,
                 WrittenVectors vectors):
        self.method, self.rank = method, rank
        self.publishing, self.vectors = publishing, vectors

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        """The time is that of the passes that follow."""

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        """A late call publishes and takes the newest result at once.

        The mean of a timely call is written directly to the application's buffer.
        """
        cdef double staging = self.method.staging_time
        cdef double writing = self.vectors.passes * self.method.copy_time
        self.vectors.passes = 0
        if step != PUBLISH and step != RETURN and (step != CONTRIBUTE or writing == 0):
            return True
        with gil:
            if step == CONTRIBUTE:
                staging = 0
            elif step == RETURN and not self.publishing.versions.timely:
                staging = 2 * staging
            self.method.simulation.later(writing + staging, PASSED, self.rank)
        return False

    cdef bint is_here(self) noexcept nogil:
        return True

    cdef bint knows_change(self) noexcept nogil:
        return True

    cdef void remember(self) noexcept nogil:
        """Nothing is compressed."""

    cdef void begin_version(self, long long version, long long number) noexcept nogil:
        """Begin the rank's part of an exchange, once a lent vector that it keeps is copied."""
        self._begin_exchange()
        with gil:
            if self.publishing.lent and self.publishing.keeps:
                self.method.simulation.later(self.method.copy_time, READY, self.rank, version)
            else:
                self.method._join_group(self.rank, version)

    cdef void begin_average(self, long long number) noexcept nogil:
        self._begin_exchange()
        with gil:
            self.method._join_all()

    cdef void _begin_exchange(self) noexcept nogil:
        self.exchanged = False
        self.copies_after = self.method.copy_time * (
            (self.publishing.copy != NOWHERE) + (self.publishing.saved != NOWHERE))

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchanged

    cdef double total_weight(self) noexcept nogil:
        return 1

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        """Exchanges need no numbers."""

    cdef void executed(self, long long version) noexcept nogil:
        with gil:
            self.method._count_version(version, self.publishing)

    cdef void returns(self, bint in_group) noexcept nogil:
        with gil:
            self.method._return(self.rank, self.publishing)


cdef class GroupAveraging(Method):
    """WAGMA-SGD's ranks: `collectives.GroupAllreduce`, as `wagma.WAGMA` calls it.

    A rank writes vectors as `SnapshotProtocol` decides: to publish, before an exchange to keep the
    vector that it lends, after an exchange for a second copy of the mean or of what that replaces,
    and to take its result. Each takes the time of one copy.

    Args:
        group_size, sync_period: S and τ.
        nbytes: length of the model, in bytes.
        wait: "nobody", or the whole "group".
        doubling: whether exchanges use recursive doubling for models of any length.
        drawing: whether each version is started by a rank drawn for it (eager-SGD, majority).
        synchronous_averages: number of vectors that all ranks average in turn every τ steps.
        overlap: whether a call only starts a group's average, and the next one waits for it.
        late: the name of the late rule.
    """

    cdef readonly int group_size
    cdef readonly long long sync_period, nbytes
    cdef readonly bint passive, doubling, drawing, fixed, overlap
    cdef readonly str late
    cdef readonly int synchronous_averages
    cdef long long[::1] staleness_counts
    cdef list driven, ports
    cdef Groups groups
    cdef int dimensions, window
    cdef int[:, ::1] peers
    # Whether an average that overlaps the next step is pending, and whether that step waits for it.
    cdef unsigned char[::1] outstanding, waiting
    # Number of members that have begun, of each group of the window's versions, by its first place.
    cdef int[:, ::1] present
    cdef int entered, moving_count
    cdef double staging_time, copy_time, agreement_time, average_time
    # By the members' nodes, or by their number where the machine has one level.
    cdef dict exchange_times

    def __init__(self, group_size, sync_period, nbytes, wait="nobody", doubling=False,
                 drawing=False, synchronous_averages=1, fixed=False, overlap=False,
                 late="paper"):
        self.group_size, self.sync_period, self.nbytes = group_size, sync_period, nbytes
        self.passive, self.doubling, self.fixed = wait == "nobody", doubling, fixed
        self.drawing, self.synchronous_averages = drawing, synchronous_averages
        self.overlap, self.late = overlap, late

    cpdef begin(self):
        cdef int ranks = self.simulation.ranks
        machine = self.simulation.machine
        self.groups = Groups(0, ranks, self.group_size, self.fixed)
        peers = [[peer for peer, _ in activation_peers(rank, ranks)] for rank in range(ranks)]
        self.peers = np.array(peers, dtype=np.intc).reshape(ranks, -1)
        self.dimensions = self.peers.shape[1]
        self.driven, self.ports = [], []
        for rank in range(ranks):
            self._add_rank(rank)
        gap = propagation_bound(ranks, self.group_size) if self.group_size > 1 else 0
        self.window = gap + 2
        self.present = np.zeros((self.window, ranks), dtype=np.intc)
        self.outstanding, self.waiting = np.zeros((2, ranks), np.uint8)
        most = min(self.sync_period, self.simulation.iterations) + gap + 1
        self.staleness = np.zeros(most, dtype=np.int64)
        self.staleness_counts = self.staleness
        self.staging_time = self.nbytes / machine.staging
        self.copy_time = self.nbytes / machine.memory
        everybody = list(self.simulation.node_of[:ranks])
        self.agreement_time = placed_allreduce_time(machine, everybody, ACTIVATION)
        self.average_time = placed_allreduce_time(machine, everybody, self.nbytes, self.doubling)
        self.average_time += 2 * self.staging_time
        self.average_time *= self.synchronous_averages
        self.exchange_times = {}

    cdef void _add_rank(self, int rank):
        cdef WrittenVectors vectors = WrittenVectors()
        cdef WaitAvoidingProtocol versions = WaitAvoidingProtocol(
            self.dimensions, self.group_size, self.sync_period, self.passive)
        cdef SnapshotProtocol publishing = SnapshotProtocol(
            vectors, versions, late_rule(self.late))
        cdef VersionsProtocol driven = VersionsProtocol(versions, publishing)
        cdef SimulatedPort port = SimulatedPort(self, rank, publishing, vectors)
        versions.attach(SimulatedTree(self, rank))
        driven.attach(port)
        if self.drawing:
            versions.draw(rank, self.simulation.ranks, 0)
        publishing.replace()
        publishing.count_once()
        vectors.passes = 0
        self.driven.append(driven)
        self.ports.append(port)

    cpdef arrives(self, int rank):
        if self.outstanding[rank]:
            self.waiting[rank] = True
        else:
            self._call(rank)

    cdef void _call(self, int rank):
        """Begin the application's call; an overlapped call of a group returns at once."""
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        cdef bint synchronous = driven.versions.is_synchronous()
        cdef bint last = self.simulation.steps[rank] == self.simulation.iterations - 1
        if self.overlap and not (last or synchronous):
            self.outstanding[rank] = True
            self.simulation.returns(rank)
        driven.publishing.give(1)
        if not synchronous:
            driven.call()
            self._react(rank, driven)
            return
        driven.enter(SYNC)
        self._react(rank, driven)
        self.entered += 1
        if self.entered == self.simulation.ranks:
            self.entered = 0
            self._later_for_all(self.agreement_time, AGREED)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        cdef long long[2] common
        if kind == ACTIVATED:
            driven.versions.activate(a, b >> 8, b & 255)
        elif kind == PASSED:
            if driven.passing == RETURN:
                self.calls += 1
                self.timely += driven.versions.timely
            driven.passed()
        elif kind == READY:
            self._join_group(rank, a)
        elif kind == EXCHANGED:
            (<SimulatedPort>self.ports[rank]).exchanged = True
        else:
            # All ranks contribute the same operation and version, so one record stands for all.
            common[0], common[1] = SYNC, driven.versions.version
            driven.agreed(common, 1, 0, False, False)
        self._react(rank, driven)

    cdef void _react(self, int rank, VersionsProtocol driven):
        """Send what is due, and take all steps that can be taken now."""
        self._send_activations(driven.versions)
        driven.advance()

    cdef void _send_activations(self, WaitAvoidingProtocol protocol):
        cdef int k
        for k in range(self.dimensions):
            if protocol.due_on() >> k & 1:
                protocol.send_on(k)

    cdef void _return(self, int rank, SnapshotProtocol contribution):
        contribution.forget()
        if not self.outstanding[rank]:
            self.simulation.returns(rank)
            return
        self.outstanding[rank] = False
        if self.waiting[rank]:
            self.waiting[rank] = False
            self._call(rank)

    cdef void _join_group(self, int rank, long long version):
        """Take part in an exchange, which begins once the last member of the group does."""
        cdef int position = self.groups._position(rank, version)
        cdef int first = self.groups.chunk_begin[position]
        cdef int slot = <int>(version % self.window)
        cdef int size, i
        cdef double time
        cdef int *members
        self.present[slot, first] += 1
        size = self.groups.chunk_end[position] - first
        if self.present[slot, first] < size:
            return
        self.present[slot, first] = 0
        members = self.groups.members
        self.groups.of(rank, version, members)
        time = self._exchange_time(members, size)
        for i in range(size):
            self._end_later(time, members[i])

    cdef double _exchange_time(self, int *members, int size):
        """Return the seconds of a group's average."""
        cdef int i
        nodes, key = [0] * size, size
        if self.simulation.machine.has_two_levels:
            nodes = [self.simulation.node_of[members[i]] for i in range(size)]
            key = tuple(nodes)
        if key not in self.exchange_times:
            self.exchange_times[key] = placed_allreduce_time(
                self.simulation.machine, nodes, self.nbytes, self.doubling)
        return self.exchange_times[key]

    cdef void _join_all(self):
        """Take part in the average over all ranks, which begins once the last rank does."""
        cdef int rank
        self.moving_count += 1
        if self.moving_count < self.simulation.ranks:
            return
        self.moving_count = 0
        for rank in range(self.simulation.ranks):
            self._end_later(self.average_time, rank)

    cdef void _end_later(self, double time, int rank):
        """End a rank's exchange after this time, and that of its copies of the mean."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        self.simulation.later(time + port.copies_after, EXCHANGED, rank)

    cdef void _later_for_all(self, double delay, int kind):
        cdef int rank
        for rank in range(self.simulation.ranks):
            self.simulation.later(delay, kind, rank)

    cdef void _count_version(self, long long version, SnapshotProtocol contribution):
        cdef long long staleness = version - contribution.published_version
        self.staleness_counts[min(staleness, self.staleness_counts.shape[0] - 1)] += 1
