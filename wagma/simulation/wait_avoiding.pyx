# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""WAGMA-SGD in simulated time: the engine's protocol, driven by events instead of MPI.

Where `collectives.engine.versions` reacts to messages and completed exchanges, this driver reacts
at the times that the machine's model gives; all decisions are those of `collectives.protocols`.
"""

import numpy as np

from collectives.topology import activation_peers, propagation_bound

from collectives.protocols.all_ranks cimport REDUCING, SYNC, TreePort
from collectives.protocols.contribution cimport NOWHERE, SnapshotProtocol, Vectors
from collectives.protocols.groups cimport Groups
from collectives.protocols.wait_avoiding cimport HELD, RUNNING, WaitAvoidingProtocol
from wagma.simulation.core cimport Method, placed_allreduce_time

# Events: an activation has arrived; a vector has been published; a call has its result; a member is
# ready to exchange, and has the mean; all ranks have agreed on a synchronization; a rank is ready to
# average over all ranks, and has the mean.
cdef enum:
    ACTIVATED
    PUBLISHED
    TAKEN
    READY
    EXCHANGED
    AGREED
    READY_FOR_ALL
    MOVED

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
        conserving: whether the late rule is the conserving one; else it is the paper's.
    """

    cdef readonly int group_size
    cdef readonly long long sync_period, nbytes
    cdef readonly bint passive, doubling, drawing, fixed, overlap, conserving
    cdef readonly int synchronous_averages
    cdef long long[::1] staleness_counts
    cdef list protocols, contributions, vectors
    cdef Groups groups
    cdef int dimensions, window
    cdef int[:, ::1] peers
    # Of each rank: the last version begun, whether it is copying, and whether it takes part in an
    # average over all ranks.
    cdef long long[::1] begun
    cdef unsigned char[::1] copying, moving
    # Whether an average that overlaps the next step is pending, and whether that step waits for it.
    cdef unsigned char[::1] outstanding, waiting
    # Seconds that each rank needs after an exchange to copy its mean, or what that replaces.
    cdef double[::1] copies_after
    # Number of members that have begun, of each group of the window's versions, by its first place.
    cdef int[:, ::1] present
    cdef int entered, moving_count
    cdef double staging_time, copy_time, agreement_time, average_time
    # By the members' nodes, or by their number where the machine has one level.
    cdef dict exchange_times

    def __init__(self, group_size, sync_period, nbytes, wait="nobody", doubling=False,
                 drawing=False, synchronous_averages=1, fixed=False, overlap=False,
                 conserving=False):
        self.group_size, self.sync_period, self.nbytes = group_size, sync_period, nbytes
        self.passive, self.doubling, self.fixed = wait == "nobody", doubling, fixed
        self.drawing, self.synchronous_averages = drawing, synchronous_averages
        self.overlap, self.conserving = overlap, conserving

    cpdef begin(self):
        cdef int ranks = self.simulation.ranks
        machine = self.simulation.machine
        self.groups = Groups(0, ranks, self.group_size, self.fixed)
        peers = [[peer for peer, _ in activation_peers(rank, ranks)] for rank in range(ranks)]
        self.peers = np.array(peers, dtype=np.intc).reshape(ranks, -1)
        self.dimensions = self.peers.shape[1]
        self.protocols = [
            WaitAvoidingProtocol(self.dimensions, self.group_size, self.sync_period, self.passive)
            for _ in range(ranks)
        ]
        self.vectors = [WrittenVectors() for _ in range(ranks)]
        self.contributions = [
            SnapshotProtocol(vectors, protocol, self.conserving, False)
            for vectors, protocol in zip(self.vectors, self.protocols)
        ]
        for rank in range(ranks):
            (<WaitAvoidingProtocol>self.protocols[rank]).attach(SimulatedTree(self, rank))
            (<SnapshotProtocol>self.contributions[rank]).replace()
            (<SnapshotProtocol>self.contributions[rank]).count_once()
            (<WrittenVectors>self.vectors[rank]).passes = 0
        if self.drawing:
            for rank in range(ranks):
                (<WaitAvoidingProtocol>self.protocols[rank]).draw(rank, ranks, 0)
        gap = propagation_bound(ranks, self.group_size) if self.group_size > 1 else 0
        self.window = gap + 2
        self.present = np.zeros((self.window, ranks), dtype=np.intc)
        self.begun = np.full(ranks, -1)
        self.copying, self.moving, self.outstanding, self.waiting = np.zeros((4, ranks), np.uint8)
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
        self.copies_after = np.zeros(ranks)
        self.exchange_times = {}

    cpdef arrives(self, int rank):
        if self.outstanding[rank]:
            self.waiting[rank] = True
        else:
            self._call(rank)

    cdef void _call(self, int rank):
        """Begin the application's call; an overlapped call of a group returns at once."""
        cdef WaitAvoidingProtocol protocol = <WaitAvoidingProtocol>self.protocols[rank]
        cdef SnapshotProtocol contribution = <SnapshotProtocol>self.contributions[rank]
        cdef bint last = self.simulation.steps[rank] == self.simulation.iterations - 1
        if self.overlap and not (last or protocol.is_synchronous()):
            self.outstanding[rank] = True
            self.simulation.returns(rank)
        contribution.give(1)
        if not protocol.is_synchronous():
            contribution.begin_call()
            protocol.call()
            self._react(rank, protocol)
            return
        protocol.enter(SYNC)
        self._react(rank, protocol)
        self.entered += 1
        if self.entered == self.simulation.ranks:
            self.entered = 0
            self._later_for_all(self.agreement_time, AGREED)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef WaitAvoidingProtocol protocol = <WaitAvoidingProtocol>self.protocols[rank]
        cdef SnapshotProtocol contribution = <SnapshotProtocol>self.contributions[rank]
        cdef long long[2] common
        if kind == ACTIVATED:
            protocol.tell(a, b >> 8, b & 255)
        elif kind == PUBLISHED:
            self.copying[rank] = False
            protocol.published()
        elif kind == TAKEN:
            self.copying[rank] = False
            self.calls += 1
            self.timely += protocol.timely
            protocol.returns()
            self._return(rank, contribution)
        elif kind == READY:
            self._join_group(rank, a)
        elif kind == EXCHANGED:
            contribution.end_version(1)
            self._count_version(a, contribution)
            protocol.finished()
        elif kind == AGREED:
            # All ranks contribute the same operation and version, so one record stands for all.
            common[0], common[1] = SYNC, protocol.version
            protocol.agreed(common, 1)
        elif kind == READY_FOR_ALL:
            self._join_all()
        else:
            self.moving[rank] = False
            contribution.end_exchange(1)
            contribution.end_average()
            protocol.reduced()
            contribution.end_operation(False)
            self._return(rank, contribution)
        self._react(rank, protocol)

    cdef void _react(self, int rank, WaitAvoidingProtocol protocol):
        """Execute what the protocol has decided, as the engine does."""
        cdef SnapshotProtocol contribution = <SnapshotProtocol>self.contributions[rank]
        self._send_activations(rank, protocol)
        if protocol.vectors == RUNNING and self.begun[rank] < protocol.running:
            self._begin_version(rank, protocol.running, contribution)
        elif self.copying[rank]:
            return
        elif contribution.calling and protocol.vectors == HELD:
            self._serve_call(rank, protocol, contribution)
        elif protocol.stage == REDUCING and not self.moving[rank]:
            self._begin_moving(rank, contribution)

    cdef void _send_activations(self, int rank, WaitAvoidingProtocol protocol):
        cdef int k
        for k in range(self.dimensions):
            if protocol.due_on() >> k & 1:
                protocol.send_on(k)

    cdef void _serve_call(
        self, int rank, WaitAvoidingProtocol protocol, SnapshotProtocol contribution
    ):
        """Schedule a call's publication, and its return once its version has been executed.

        A late call publishes and takes the newest result at once. The mean of a timely call is
        written directly to the application's buffer.
        """
        cdef double staging = self.staging_time
        cdef int kind = TAKEN
        self.copying[rank] = True
        if not protocol.timely:
            contribution.end_call()
            staging = 2 * staging
        elif not contribution.published:
            contribution.lend()
            kind = PUBLISHED
        else:
            contribution.end_call()
        self.simulation.later(self._writing_time(rank) + staging, kind, rank)

    cdef double _writing_time(self, int rank):
        """Return the seconds of the passes that the rank's protocol has just asked for."""
        cdef WrittenVectors vectors = <WrittenVectors>self.vectors[rank]
        cdef int passes = vectors.passes
        vectors.passes = 0
        return passes * self.copy_time

    cdef void _note_copies(self, int rank, SnapshotProtocol contribution):
        """Note what the rank writes after the exchange that it begins, besides the mean."""
        self.copies_after[rank] = self.copy_time * (
            (contribution.copy != NOWHERE) + (contribution.saved != NOWHERE))

    cdef void _return(self, int rank, SnapshotProtocol contribution):
        contribution.forget()
        if not self.outstanding[rank]:
            self.simulation.returns(rank)
            return
        self.outstanding[rank] = False
        if self.waiting[rank]:
            self.waiting[rank] = False
            self._call(rank)

    cdef void _begin_version(self, int rank, long long version, SnapshotProtocol contribution):
        """Begin the rank's part of an exchange, once a lent vector that it keeps is copied."""
        self.begun[rank] = version
        contribution.begin_version()
        self._note_copies(rank, contribution)
        if contribution.lent and contribution.keeps:
            self.simulation.later(self.copy_time, READY, rank, version)
        else:
            self._join_group(rank, version)

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
            self.simulation.later(
                time + self.copies_after[members[i]], EXCHANGED, members[i], version)

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

    cdef void _begin_moving(self, int rank, SnapshotProtocol contribution):
        """Begin the rank's part of the average over all ranks, once it has published."""
        cdef double writing
        self.moving[rank] = True
        contribution.begin_average()
        self._note_copies(rank, contribution)
        writing = self._writing_time(rank)
        if writing > 0:
            self.simulation.later(writing, READY_FOR_ALL, rank)
        else:
            self._join_all()

    cdef void _join_all(self):
        """Take part in the average over all ranks, which begins once the last rank does."""
        cdef int rank
        self.moving_count += 1
        if self.moving_count < self.simulation.ranks:
            return
        self.moving_count = 0
        for rank in range(self.simulation.ranks):
            self.simulation.later(self.average_time + self.copies_after[rank], MOVED, rank)

    cdef void _later_for_all(self, double delay, int kind):
        cdef int rank
        for rank in range(self.simulation.ranks):
            self.simulation.later(delay, kind, rank)

    cdef void _count_version(self, long long version, SnapshotProtocol contribution):
        cdef long long staleness = version - contribution.published_version
        self.staleness_counts[min(staleness, self.staleness_counts.shape[0] - 1)] += 1
