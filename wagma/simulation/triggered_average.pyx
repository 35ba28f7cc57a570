"""Simulates local SGD whose averages the fastest rank starts, with the engine's protocol.

Vectors have values if ranks train: see `wagma.simulation.group_parts`.
"""

from cpython.buffer cimport PyBUF_WRITABLE

import numpy as np

from collectives.topology import activation_peers

from collectives.memory.layout cimport Layout, UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport JOIN, SYNC, TreePort
from collectives.protocols.contribution cimport RESULT, SCRATCH, SNAPSHOT, X
from collectives.protocols.rank_port cimport RankPort
from collectives.protocols.triggered_average cimport (
    HeldContribution,
    TriggeredAverageProtocol,
    TriggeredRankProtocol,
)
from wagma.simulation.core cimport Method, mpi_allreduce_time
from wagma.simulation.values cimport Average
from wagma.simulation.vectors cimport NoVectors, add_vector

# Events: an activation has arrived; all ranks have averaged.
cdef enum:
    ACTIVATED
    AVERAGED

cdef enum:
    # Bytes of an activation.
    ACTIVATION = 16


cdef class Activations(TreePort):
    """Sends one rank's activations."""

    cdef TriggeredAveraging method
    cdef int rank

    def __init__(self, TriggeredAveraging method, int rank):
        self.method, self.rank = method, rank

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        with gil:
            self.method.simulation.send(
                self.rank, self.method.peers[self.rank, dimension], ACTIVATION, ACTIVATED,
                version, dimension)


cdef class AveragingPort(RankPort):
    """Executes one rank's steps: all of an average takes place at the time of its end.

    Attributes:
        vectors: the vectors of a rank that trains; None: they have no values. The SNAPSHOT, if any,
            is what it sends differences from.
        given: the application's vector, whose memory it keeps alive.
        exchanged: whether the rank has the mean; `total` is the weight of that.
    """

    cdef TriggeredAveraging method
    cdef int rank
    cdef TriggeredRankProtocol deciding
    cdef HeldContribution held
    cdef HostVectors vectors
    cdef UserVector given
    cdef bint exchanged
    cdef double total

    def __init__(self, TriggeredAveraging method, int rank, HostVectors vectors,
                 TriggeredRankProtocol deciding, HeldContribution held):
        self.method, self.rank, self.vectors = method, rank, vectors
        self.deciding, self.held, self.total = deciding, held, 1
        if vectors is not None:
            add_vector(vectors, SCRATCH)
        deciding.attach(self)

    cdef int give(self, vector, int flags) except -1:
        """Set the application's vector."""
        self.given = UserVector(vector, self.vectors.layout, flags)
        self.vectors.of[X] = self.given.arrays
        return 0

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        pass

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        return True

    cdef void remember(self) noexcept nogil:
        if self.vectors is not None and self.vectors.start[SNAPSHOT] != NULL:
            self.vectors.copy(SNAPSHOT, X if self.held.target == X else SCRATCH)

    cdef void begin_average(self, long long number) noexcept nogil:
        self.exchanged = self.vectors is None
        if not self.exchanged:
            with gil:
                self.method._average(self.rank)

    cdef void contribute(self, Average average) noexcept nogil:
        """Add what the rank averages to the average."""
        cdef int source = X if self.held.lent else self.held.source
        average.add(self.vectors.of[source], self.held.weight, self.vectors.start[SNAPSHOT])

    cdef void take(self, Average average) noexcept nogil:
        """Store the mean where it goes."""
        self.total, self.exchanged = average.weight, True
        average.write(
            self.vectors.arrays(self.held.target), self.vectors.arrays(self.held.copy), NULL,
            NULL, self.vectors.start[SNAPSHOT])

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchanged

    cdef double total_weight(self) noexcept nogil:
        return self.total

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        pass

    cdef void returns(self, bint in_group) noexcept nogil:
        with gil:
            self.method._return(self.rank)


cdef class TriggeredAveraging(Method):
    """The ranks of `collectives.TriggeredAverage`, as `wagma.LocalSGD` calls it.

    A rank that has made all its steps takes part at once in averages that the others start.

    Args:
        sync_period: τ.
        nbytes: length of the model, in bytes.
        layout: of the models, if they have values.
        sharing: whether the ranks of a node average in memory that they share; it changes the order
            of additions, not the times.
        weighing: the models' weights, as `settings.weighing` returns them.
        wire_dtype: see `collectives.TriggeredAverage`.
    """

    cdef readonly long long sync_period, nbytes
    cdef list ranks, ports
    cdef int[:, ::1] peers
    # Ranks that have entered an operation, that have joined, that have left for good, and for which
    # the operation under way has not ended yet; whether that lets all end their joining.
    cdef int entered, joined, gone, ending
    cdef bint finishing
    # Of each rank, its operation and version when that began; whether it has left.
    cdef long long[::1] records
    cdef unsigned char[::1] left
    cdef long long loading
    cdef double average_time
    cdef Layout layout
    cdef Average average
    # Whether vectors are averaged in slices, whatever their length; ranks that have begun to.
    cdef bint sliced
    cdef int begun
    cdef object weighing, wire_dtype

    def __init__(self, sync_period, nbytes, Layout layout=None, sharing=False, weighing=None,
                 wire_dtype=None):
        self.sync_period, self.nbytes = sync_period, nbytes
        self.layout, self.sliced = layout, sharing
        self.weighing, self.wire_dtype = weighing, wire_dtype
        self.updates = 0

    cpdef begin(self):
        cdef int ranks = self.simulation.ranks
        machine = self.simulation.machine
        peers = [[peer for peer, _ in activation_peers(rank, ranks)] for rank in range(ranks)]
        self.peers = np.array(peers, dtype=np.intc).reshape(ranks, -1)
        self.records = np.zeros(2 * ranks, dtype=np.int64)
        self.left = np.zeros(ranks, dtype=np.uint8)
        self.average_time = mpi_allreduce_time(machine, ranks, self.nbytes)
        self.average_time += 2 * self.nbytes / machine.staging
        self.ranks, self.ports = [], []
        for rank in range(ranks):
            self._add_rank(rank)
        if self.layout is not None:
            self.average = Average(self.layout, ranks, self.wire_dtype)
        if self.simulation.node_of[0] != self.simulation.node_of[ranks - 1]:
            self.sliced = False

    cdef _add_rank(self, int rank):
        cdef HostVectors vectors = None if self.layout is None else HostVectors(self.layout)
        cdef TriggeredAverageProtocol protocol = TriggeredAverageProtocol(
            self.peers.shape[1], self.sync_period)
        cdef HeldContribution held = HeldContribution(
            NoVectors() if vectors is None else vectors, protocol)
        cdef TriggeredRankProtocol deciding = TriggeredRankProtocol(protocol, held)
        if self.weighing is not None:
            weighing, log_rate, most_work = self.weighing
            held.weigh_by(weighing, log_rate, most_work)
        protocol.attach(Activations(self, rank))
        self.ranks.append(deciding)
        self.ports.append(AveragingPort(self, rank, vectors, deciding, held))

    # What applications that train call, by `wagma.simulation.group_parts`

    def send_differences(self, int rank, like=None):
        """Send compressed vectors as differences from this one, or from zeros."""
        cdef HostVectors vectors = (<AveragingPort>self.ports[rank]).vectors
        if not self.average.compressed:
            return
        if vectors.start[SNAPSHOT] == NULL:
            self.layout.zero_vector(add_vector(vectors, SNAPSHOT))
        if like is not None:
            (<AveragingPort>self.ports[rank]).give(like, 0)
            vectors.copy(SNAPSHOT, X)

    def begin_call(self, int rank, vector, weight):
        """Begin a call with this vector."""
        cdef AveragingPort port = <AveragingPort>self.ports[rank]
        port.give(vector, PyBUF_WRITABLE)
        self._call(rank, port.held.worked(weight))

    def begin_operation(self, int rank, int operation, vector, weight=None, loading=0):
        """Begin an operation of all ranks with this vector; its weight is that of the last call.

        Args:
            loading: the number of the next average after LOAD.
        """
        cdef AveragingPort port = <AveragingPort>self.ports[rank]
        port.give(vector, PyBUF_WRITABLE)
        port.held.give(
            port.held.published_weight if weight is None else weight)
        self.loading = loading
        if operation == JOIN:
            self._join(rank)
            return
        port.deciding.enter(operation)
        self.entered += 1
        self._begin_if_all_are_there()

    def leave(self, int rank):
        """Let a rank that makes no more calls join for good, with a copy of its last vector."""
        cdef AveragingPort port = <AveragingPort>self.ports[rank]
        self.left[rank] = True
        self.gone += 1
        if port.given is not None:
            add_vector(port.vectors, RESULT)
            port.vectors.copy(RESULT, X)
            port.vectors.of[X] = port.vectors.of[RESULT]
        self._stay_joined(rank)

    cdef _stay_joined(self, int rank):
        cdef AveragingPort port = <AveragingPort>self.ports[rank]
        if port.given is not None:
            port.held.give(port.held.published_weight)
        self._join(rank)

    def version_of(self, int rank):
        """Return the number of the next average over all ranks."""
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        return deciding.operations.version + deciding.operations.base

    def result_of(self, int rank):
        """Return the fields of a `collectives.Result`, of the call that has returned."""
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        called = deciding.called + deciding.operations.base
        if deciding.alone:
            return called, True, called, (rank,), deciding.weight, False
        everybody = tuple(range(self.simulation.ranks))
        return called, deciding.held.finite, called, everybody, deciding.weight, True

    def counts_of(self, int rank):
        """Return the counts of `collectives.statistics.Statistics`, in its order, to `left_out`.
        """
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        return (deciding.triggering.calls, deciding.timely, deciding.synchronizations, 0, 0, (),
                deciding.held.nonfinite)

    cpdef arrives(self, int rank):
        self._call(rank, 1)

    cdef _call(self, int rank, double weight):
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        deciding.held.give(weight)
        deciding.call()
        if deciding.operations.operation == SYNC:
            self.entered += 1
            self._begin_if_all_are_there()
        self._send(deciding.triggering)

    cdef _join(self, int rank):
        (<TriggeredRankProtocol>self.ranks[rank]).enter(JOIN)
        self.joined += 1
        self._begin_if_all_are_there()

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        if kind == ACTIVATED:
            deciding.triggering.activate(a, b)
            self._send(deciding.triggering)
            return
        if not deciding.operations.joined:
            self.entered -= 1
        elif self.finishing:
            self.joined -= 1
        deciding.agreed(&self.records[0], self.simulation.ranks, self.loading, False, False)
        deciding.advance()
        self.ending -= 1
        if self.ending == 0:
            self._begin_if_all_are_there()

    cdef void _average(self, int rank):
        """Take part in an average; the last rank averages for all, and all go on from it."""
        cdef AveragingPort port
        self.begun += 1
        if self.begun < self.simulation.ranks:
            return
        self.begun = 0
        self.average.begin()
        for port in self.ports:
            port.contribute(self.average)
        self.average.compute(self.sliced)
        for port in self.ports:
            port.take(self.average)
        for port in self.ports:
            if port.rank != rank:
                port.deciding.advance()

    cdef void _return(self, int rank):
        """Return from the call; after its last call the rank joins."""
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        if self.left[rank]:
            self._stay_joined(rank)
            return
        self.simulation.returns(rank)
        if self.layout is not None:
            deciding.held.forget()
        if self.simulation.is_done(rank):
            self._join(rank)

    cdef void _begin_if_all_are_there(self):
        """Schedule the operation if one has been started and no rank computes.

        Ranks that train and have all joined end that together.
        """
        cdef TriggeredRankProtocol deciding
        cdef int rank
        if self.ending or self.entered + self.joined < self.simulation.ranks:
            return
        self.finishing = self.entered == 0
        if self.finishing and (self.layout is None or self.gone == self.simulation.ranks):
            return
        for rank in range(self.simulation.ranks):
            deciding = <TriggeredRankProtocol>self.ranks[rank]
            self.records[2 * rank] = deciding.operations.operation
            self.records[2 * rank + 1] = deciding.operations.version
        self.updates += 1
        self.ending = self.simulation.ranks
        for rank in range(self.simulation.ranks):
            self.simulation.later(self.average_time, AVERAGED, rank)

    cdef void _send(self, TriggeredAverageProtocol protocol):
        cdef int k
        for k in range(self.peers.shape[1]):
            if protocol.due_on() >> k & 1:
                protocol.send_on(k)
