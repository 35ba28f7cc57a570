"""WAGMA-SGD in simulated time: the engine's protocol, driven by events instead of MPI.

Where the engine reacts to messages and completed exchanges, this driver reacts at the times that the
machine's model gives; all decisions are those of `collectives.protocols.versions`. Vectors have
values if ranks train: see `wagma.simulation.parts`.
"""

import numpy as np

from collectives.protocols.late_rules import late_rule
from collectives.topology import activation_peers, propagation_bound

from collectives.memory.layout cimport Layout
from collectives.protocols.all_ranks cimport SYNC
from collectives.protocols.contribution cimport KEPT
from collectives.protocols.groups cimport Groups
from collectives.protocols.own_pace cimport OwnPaceProtocol
from collectives.protocols.rank cimport RETURN
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.versions cimport FETCHING, LEASING, VersionsProtocol
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol
from wagma.simulation.core cimport placed_allreduce_time
from wagma.simulation.values cimport Average
from wagma.simulation.vectors cimport add_vector, new_memory
from wagma.simulation.version_port cimport (
    ACTIVATED,
    ACTIVATION,
    AGREED,
    EXCHANGED,
    FREED,
    PASSED,
    READY,
    SimulatedPort,
    SimulatedTree,
    VersionsMethod,
    WrittenVectors,
)


cdef class GroupAveraging(VersionsMethod):
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
        layout: of the models, if they have values; see `initialize`.
        sharing: whether the ranks of a node average in memory that they share; it changes the order
            of additions, not the times.
        weighing: the models' weights, as `settings.weighing` returns them.
        wire_dtype: see `collectives.GroupAllreduce`.
        seed: of the drawing.
        own_pace: whether ranks make any number of calls: see `collectives.protocols.own_pace`.
        array_periods: of each of the layout's arrays, as `settings.periods_of` returns them.
    """

    cdef readonly int group_size
    cdef readonly long long sync_period, nbytes
    cdef readonly bint passive, doubling, drawing, fixed, overlap, own_pace
    cdef readonly str late
    cdef readonly int synchronous_averages
    cdef long long[::1] staleness_counts
    cdef list driven, ports
    cdef Groups groups
    cdef int dimensions, window
    # Whether an average that overlaps the next step is pending, and whether that step waits for it.
    cdef unsigned char[::1] outstanding, waiting
    # Number of members that have begun, of each group of the window's versions, by its first place.
    cdef int[:, ::1] present
    cdef int entered, moving_count
    # The highest version of a rank that has entered an operation.
    cdef long long agreed_version
    cdef double agreement_time, average_time
    cdef Layout layout
    cdef Average average
    cdef bint sharing
    cdef object weighing, wire_dtype, array_periods
    cdef unsigned long long seed
    # By the members' nodes, or by their number where the machine has one level.
    cdef dict exchange_times
    cdef bint two_levels

    def __init__(self, group_size, sync_period, nbytes, wait="nobody", doubling=False,
                 drawing=False, synchronous_averages=1, fixed=False, overlap=False,
                 late="paper", Layout layout=None, sharing=False, weighing=None, wire_dtype=None,
                 seed=0, own_pace=False, array_periods=(1,)):
        self.array_periods = array_periods
        self.own_pace = own_pace
        self.group_size, self.sync_period, self.nbytes = group_size, sync_period, nbytes
        self.passive, self.doubling, self.fixed = wait == "nobody", doubling, fixed
        self.drawing, self.synchronous_averages = drawing, synchronous_averages
        self.overlap, self.late = overlap, late
        self.layout, self.sharing = layout, sharing
        self.weighing, self.wire_dtype, self.seed = weighing, wire_dtype, seed

    cpdef begin(self):
        cdef int ranks = self.simulation.ranks
        machine = self.simulation.machine
        self.groups = Groups(
            0, ranks, self.group_size, self.fixed, self.sync_period if self.own_pace else 0,
            self.array_periods)
        peers = [[peer for peer, _ in activation_peers(rank, ranks)] for rank in range(ranks)]
        self.peers = np.array(peers, dtype=np.intc).reshape(ranks, -1)
        self.dimensions = self.peers.shape[1]
        self.driven, self.ports = [], []
        if self.layout is not None:
            self.average = Average(self.layout, ranks, self.wire_dtype)
        for rank in range(ranks):
            self._add_rank(rank)
        gap = self._most_apart(ranks)
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
        self.two_levels = machine.has_two_levels

    cdef int _most_apart(self, int ranks):
        """Return how many versions two ranks of one group are apart at most."""
        if self.own_pace and (self.fixed or self.group_size == 1):
            # Only versions of all ranks, which are a period apart, connect the groups.
            return min(self.sync_period, self.simulation.iterations)
        return propagation_bound(ranks, self.group_size) if self.group_size > 1 else 0

    cdef void _add_rank(self, int rank):
        cdef WrittenVectors vectors = WrittenVectors(self.layout)
        kind = OwnPaceProtocol if self.own_pace else WaitAvoidingProtocol
        cdef WaitAvoidingProtocol versions = kind(
            self.dimensions, self.group_size, self.sync_period, self.passive)
        cdef SnapshotProtocol publishing = SnapshotProtocol(
            vectors, versions, late_rule(self.late))
        cdef VersionsProtocol driven = VersionsProtocol(versions, publishing)
        cdef SimulatedPort port = SimulatedPort(self, rank, publishing, vectors)
        versions.attach(SimulatedTree(self, rank))
        driven.attach(port)
        if self.drawing:
            versions.draw(rank, self.simulation.ranks, self.seed)
        self.driven.append(driven)
        self.ports.append(port)
        if self.layout is None:
            publishing.replace()
            publishing.count_once()
            vectors.passes = 0

    # What applications that train call, by `wagma.simulation.parts`

    def initialize(self, int rank, vector, bint keep_average, leased=None):
        """Begin with this vector of a rank, an array or a list of arrays.

        Args:
            keep_average: whether the rank keeps the newest average over all ranks.
            leased: see `collectives.engine.versions.GroupVersions`.
        """
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        if self.weighing is not None:
            weighing, log_rate, most_work = self.weighing
            port.publishing.weigh_by(weighing, log_rate, most_work)
        port.publishing.keeps_average = keep_average
        if keep_average:
            add_vector(port.vectors.values, KEPT)
        if leased is not None:
            port.vectors.values.have_part(leased[0], leased[1])
            port.publishing.lease.begin(self.sync_period)
        port.vectors.give(vector)
        port.publishing.replace()
        port.publishing.count_once()
        port.vectors.passes = 0
        if self.average.compressed:
            port.reference = new_memory(self.layout.size)
            self.layout.zero_vector(port.reference.address)

    def compress_from_initial(self, int rank):
        """Send compressed vectors as differences from the initial one, which all ranks have."""
        (<SimulatedPort>self.ports[rank]).remember()

    def begin_call(self, int rank, vector, weight):
        """Begin a call with this vector."""
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        (<SimulatedPort>self.ports[rank]).vectors.give(vector)
        driven.publishing.give(driven.publishing.worked(weight))
        self._begin(rank, driven)

    def begin_operation(self, int rank, int operation, vector, weight=None):
        """Begin an operation of all ranks with this vector; its weight is that of the last call."""
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        (<SimulatedPort>self.ports[rank]).vectors.give(vector)
        driven.publishing.give(driven.publishing.published_weight if weight is None else weight)
        self._enter(rank, driven, operation)

    def begin_fetch(self, int rank, vector):
        """Begin to overwrite this vector by the average that the rank keeps."""
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        (<SimulatedPort>self.ports[rank]).vectors.give(vector)
        driven.publishing.give(driven.publishing.published_weight)
        driven.hold(FETCHING)
        self._react(rank, driven)

    def begin_lease(self, int rank, vector):
        """Begin to take the leased arrays of this vector as the rank's part of them."""
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        (<SimulatedPort>self.ports[rank]).vectors.give(vector)
        driven.publishing.give(driven.publishing.published_weight)
        driven.hold(LEASING)
        self._react(rank, driven)

    def keeps(self, int rank):
        """Return whether a rank keeps an average."""
        return (<SimulatedPort>self.ports[rank]).publishing.kept_version >= 0

    def fetched(self, int rank):
        """Return the version of the average that a rank has got, and the mean of the counts then.
        """
        publishing = (<SimulatedPort>self.ports[rank]).publishing
        return publishing.fetched_version, publishing.fetched_count

    def mean_count(self, int rank):
        """Return the mean of all ranks' counts in the newest average over all that a rank knows."""
        return (<SimulatedPort>self.ports[rank]).publishing.job.told

    def run_on(self, int rank):
        """Let a rank's application compute while the call goes on that it has just begun."""
        if (<VersionsProtocol>self.driven[rank]).publishing.present:
            self.outstanding[rank] = True
            self.simulation.returns(rank)

    def is_outstanding(self, int rank):
        """Return whether that call is not complete; else let it end the rank's wait."""
        if self.outstanding[rank]:
            self.waiting[rank] = True
        return self.outstanding[rank]

    def version_of(self, int rank):
        """Return the number of a rank's next call."""
        return (<VersionsProtocol>self.driven[rank]).versions.version

    def result_of(self, int rank):
        """Return the fields of a `collectives.Result`, of the call that has returned."""
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        if not driven.in_group:
            everybody = tuple(range(self.simulation.ranks))
            called = driven.called
            return called, driven.publishing.finite, called, everybody, driven.weight, True
        timely = driven.versions.timely and driven.publishing.finite
        group = (<SimulatedPort>self.ports[rank]).group
        return driven.called, timely, driven.source, group, driven.weight, False

    def counts_of(self, int rank):
        """Return the counts of `collectives.statistics.Statistics`, in its order, to `left_out`.
        """
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        counts = (<SimulatedPort>self.ports[rank]).staleness
        staleness = tuple([counts.get(age, 0) for age in range(max(counts, default=-1) + 1)])
        executed = sum(staleness)
        passive = executed - counts.get(0, 0)
        return (driven.versions.calls, driven.timely, driven.synchronizations, executed, passive,
                staleness, driven.publishing.nonfinite)

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
        self._begin(rank, driven)

    cdef void _begin(self, int rank, VersionsProtocol driven):
        """Begin a call, of a version or of all ranks."""
        if driven.versions.is_synchronous():
            self._enter(rank, driven, SYNC)
            return
        driven.call()
        self._react(rank, driven)

    cdef void _enter(self, int rank, VersionsProtocol driven, int operation):
        """Enter an operation of all ranks, which agree on it once the last one enters."""
        driven.enter(operation)
        self._react(rank, driven)
        self.entered += 1
        self.agreed_version = max(self.agreed_version, driven.versions.version)
        if self.entered == self.simulation.ranks:
            self.entered = 0
            self._later_for_all(self.agreement_time, AGREED)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef VersionsProtocol driven = <VersionsProtocol>self.driven[rank]
        cdef long long[2] common
        if kind == ACTIVATED:
            driven.versions.activate(a, b >> 8, b & 255)
        elif kind == FREED:
            driven.versions.free(a, <int>b)
        elif kind == PASSED:
            if driven.passing == RETURN:
                self.calls += 1
                self.timely += driven.versions.timely
            driven.passed()
        elif kind == READY:
            self.join_group(rank, a)
        elif kind == EXCHANGED:
            (<SimulatedPort>self.ports[rank]).exchanged = True
        else:
            # All ranks contribute the same operation, so one record stands for all.
            common[0], common[1] = driven.versions.operation, self.agreed_version
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

    cdef void end_call(self, int rank, SnapshotProtocol contribution, bint in_group):
        contribution.forget()
        if in_group and self.layout is not None:
            self._note_group(rank, contribution.versions.source)
        if not self.outstanding[rank]:
            self.simulation.returns(rank)
            return
        self.outstanding[rank] = False
        if self.waiting[rank]:
            self.waiting[rank] = False
            if self.layout is None:
                self._call(rank)
            else:
                self.simulation.returns(rank)

    cdef void _note_group(self, int rank, long long version):
        """Note the members of the group whose mean a rank's call returns."""
        cdef int size = self.groups.of(rank, version, self.groups.members)
        cdef int i
        members = [self.groups.members[i] for i in range(size)]
        (<SimulatedPort>self.ports[rank]).group = tuple(sorted(members))

    cdef void join_group(self, int rank, long long version):
        """Take part in an exchange, which begins once the last member of the group does."""
        cdef int first = self.groups.first(rank, version)
        cdef int slot = <int>(version % self.window)
        cdef int size, i
        cdef double time
        cdef int *members = self.groups.members
        self.present[slot, first] += 1
        size = self.groups.size_of(rank, version)
        if self.present[slot, first] < size:
            return
        self.present[slot, first] = 0
        self.groups.of(rank, version, members)
        cdef int averaged = self.groups.averaged(version)
        if self.layout is not None:
            self._exchange(members, size, averaged)
        time = self._exchange_time(members, size, averaged)
        for i in range(size):
            self._end_later(time, members[i])

    cdef void _exchange(self, int *members, int size, int averaged):
        """Average so many of the members' arrays, now that all have begun the exchange."""
        cdef int i
        cdef bint together = self.sharing
        self.average.begin()
        for i in range(size):
            (<SimulatedPort>self.ports[members[i]]).contribute(self.average)
            together = together and (
                self.simulation.node_of[members[i]] == self.simulation.node_of[members[0]])
        self.average.averaged = averaged
        self.average.compute(together)
        for i in range(size):
            (<SimulatedPort>self.ports[members[i]]).take(self.average)

    cdef double _exchange_time(self, int *members, int size, int averaged):
        """Return the seconds of a group's average."""
        cdef int i
        nodes, key = [0] * size, (size, averaged)
        if self.two_levels:
            nodes = [self.simulation.node_of[members[i]] for i in range(size)]
            key = (*nodes, averaged)
        if key not in self.exchange_times:
            self.exchange_times[key] = placed_allreduce_time(
                self.simulation.machine, nodes, self._bytes_of(averaged), self.doubling)
        return self.exchange_times[key]

    cdef long long _bytes_of(self, int averaged):
        """Return how many bytes of the model so many arrays have, of whatever length it is."""
        if self.layout is None or averaged == self.layout.count:
            return self.nbytes
        sizes = [self.layout.bytes[i] for i in range(self.layout.count)]
        return round(self.nbytes * sum(sizes[:averaged]) / sum(sizes))

    cdef void join_all(self):
        """Take part in the average over all ranks, which begins once the last rank does."""
        cdef int rank
        self.moving_count += 1
        if self.moving_count < self.simulation.ranks:
            return
        self.moving_count = 0
        for rank in range(self.simulation.ranks):
            self.groups.members[rank] = rank
        if self.layout is not None:
            self._exchange(
                self.groups.members, self.simulation.ranks, self.layout.count)
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

    cdef void count_version(
        self, long long version, SnapshotProtocol contribution, dict counts
    ):
        cdef long long staleness = version - contribution.published_version
        self.staleness_counts[min(staleness, self.staleness_counts.shape[0] - 1)] += 1
        if self.layout is not None:
            counts[staleness] = counts.get(staleness, 0) + 1
