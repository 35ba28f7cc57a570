"""Simulates the methods whose ranks send each other vectors.

It does what `collectives.engine.mailbox` does over MPI, at the times of the machine's model; all
decisions are those of a `PeerProtocol` and of `collectives.protocols.peer_rank`.
"""

from collections import deque

from collectives import graphs
from collectives.protocols.neighbor_average import NeighborAverageProtocol
from collectives.protocols.pairwise_average import PairwiseAverageProtocol
from collectives.protocols.parameter_server import ParameterServerProtocol
from collectives.protocols.push_sum import PushSumProtocol
from collectives.protocols.queued_neighbor_average import QueuedNeighborAverageProtocol
from collectives.queue_settings import QueueSettings

from collectives.protocols.peer_rank cimport PeerRankPort, PeerRankProtocol
from collectives.protocols.peers cimport PeerProtocol
from wagma.simulation.core cimport Method, Simulation

cdef enum:
    # Events: an application's vector has been staged in the engine's memory; a message has arrived.
    STAGED
    CAME
    # Bytes of a message without a vector.
    SHORT = 64


cdef class SimulatedPort(PeerRankPort):
    """The actions of one rank's engine, and the time that they take.

    Scaling a vector, and adding one to another, each take one pass at the machine's memory
    bandwidth; sending takes none, nor does recording a change, or saving what the application got.
    Later messages of the engine, and the return of the model to its application, wait for these
    passes.
    """

    cdef Simulation simulation
    cdef readonly PeerProtocol protocol
    cdef PeerRankProtocol deciding
    cdef int rank, kind
    cdef long long number, nbytes, length, skipped
    cdef double weight, pass_time, staging_time
    # By source, oldest first: the messages in flight, and the weights of those not mixed yet.
    cdef dict coming, weights

    def __init__(self, Simulation simulation, int rank, long long nbytes):
        self.simulation, self.rank, self.length = simulation, rank, nbytes
        self.pass_time = nbytes / <double>simulation.machine.memory
        self.staging_time = nbytes / <double>simulation.machine.staging
        self.coming, self.weights = {}, {}
        self.skipped = 0
        self.deciding = PeerRankProtocol(self)

    cdef void take_time(self, int passes) noexcept nogil:
        """Keep the engine busy for this number of consecutive passes over a vector."""
        cdef double began = max(self.simulation.now, self.simulation.engine_free[self.rank])
        self.simulation.engine_free[self.rank] = began + passes * self.pass_time

    cdef void write(self, int kind, long long number) noexcept nogil:
        self.kind, self.number, self.weight, self.nbytes = kind, number, 0, SHORT

    cdef void write_model(self, int kind, long long number, double weight) noexcept nogil:
        self.kind, self.number, self.weight = kind, number, weight
        self.nbytes = SHORT + self.length

    cdef void write_change(self, int kind, long long number) noexcept nogil:
        self.write_model(kind, number, 0)

    cdef void post(self, int destination) noexcept nogil:
        with gil:
            self.send(destination)

    cdef void send(self, int destination):
        cdef SimulatedPort other = (<PeerMethod>self.simulation.method).ports[destination]
        message = self.kind, self.number, self.weight
        other.coming.setdefault(self.rank, deque()).append(message)
        self.simulation.send(self.rank, destination, self.nbytes, CAME, self.rank)

    cdef double mix(self, int source, double keep, double share) noexcept nogil:
        self.take_time(1)
        with gil:
            if self.weights:
                return <double>self.weights[source].popleft()
        return 0

    cdef void halve(self, int source, int kind, long long number) noexcept nogil:
        self.take_time(2)
        self.kind, self.number, self.weight = kind, number, 0
        self.nbytes = SHORT + self.length
        self.post(source)

    cdef void drop(self, int source) noexcept nogil:
        pass

    cdef void scale(self, double factor) noexcept nogil:
        self.take_time(1)

    cdef void publish(self, double scale) noexcept nogil:
        self.take_time(1)

    cdef void replace(self) noexcept nogil:
        self.take_time(1)

    cdef void record(self, bint against_model) noexcept nogil:
        pass

    cdef void save(self) noexcept nogil:
        pass

    cdef bint is_change_finite(self, bint against_model) noexcept nogil:
        return True

    cdef void return_model(self, double scale) noexcept nogil:
        """Return the model to the application once all passes are complete."""
        cdef double ready
        cdef int iterations = 1 + self.protocol.skipped - self.skipped
        self.skipped = self.protocol.skipped
        self.take_time(1)
        ready = self.simulation.engine_free[self.rank] - self.simulation.now
        with gil:
            self.simulation.returns(self.rank, ready + self.staging_time, iterations)


cdef class PeerMethod(Method):
    """The ranks of a protocol of `collectives.protocols.peers`.

    Args:
        make: function of (port, rank, size) that returns the rank's protocol.
        nbytes: length of the model, in bytes.
        servers: number of ranks of the protocol, the last ones, whose applications make no calls.
    """

    cdef object make
    cdef long long nbytes
    cdef list ports

    def __init__(self, make, nbytes, servers=0):
        self.make, self.nbytes, self.servers = make, nbytes, servers

    cpdef begin(self):
        cdef int rank, size = self.simulation.engines
        cdef SimulatedPort port
        self.ports = [SimulatedPort(self.simulation, rank, self.nbytes) for rank in range(size)]
        for port in self.ports:
            port.protocol = self.make(port.deciding, port.rank, size)
            port.deciding.attach(port.protocol)
        for port in self.ports:
            port.protocol.begin()
        for rank in range(self.simulation.ranks, size):
            port = <SimulatedPort>self.ports[rank]
            port.protocol.leave(False)

    def protocol(self, rank):
        """Return a rank's protocol."""
        return self.ports[rank].protocol

    cpdef arrives(self, int rank):
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        self.simulation.later(port.staging_time, STAGED, rank)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        cdef double weight
        if kind == STAGED:
            port.deciding.call()
        else:
            # An engine that polls finds earlier messages, too, and takes the oldest first.
            kind, number, weight = port.coming[a].popleft()
            if weight != 0:
                port.weights.setdefault(a, deque()).append(weight)
            port.protocol.arrived(a, kind, number, weight)
        if self.simulation.is_done(rank) and not port.protocol.leaving:
            port.protocol.leave(False)


def d_psgd(settings, ranks):
    """Return D-PSGD's ranks."""
    destinations, sources = graphs.neighbor_lists(graphs.edges_of(settings.graph, ranks), ranks)
    everybody = settings.clock == "global"

    def make(port, rank, size):
        share = 1 / (1 + len(sources[rank]))
        shares = [share] * len(sources[rank])
        return NeighborAverageProtocol(
            port, rank, size, sources[rank], shares, share, destinations[rank], everybody
        )

    return PeerMethod(make, settings.nbytes)


def hop(settings, ranks):
    """Return Hop's ranks.

    Raises:
        ValueError: an option is out of range, or cannot be combined with the others.
    """
    edges = graphs.edges_of(settings.graph or "ring-based", ranks)
    destinations, sources = graphs.neighbor_lists(edges, ranks)
    chosen = QueueSettings(
        settings.max_gap,
        settings.backup,
        settings.staleness,
        settings.mean,
        settings.max_skip,
        settings.skip_trigger,
        settings.mode or "standard",
        settings.order,
    ).checked(edges, ranks)

    def make(port, rank, size):
        return QueuedNeighborAverageProtocol(
            port, rank, size, sources[rank], destinations[rank], **chosen.of_rank(rank)
        )

    return PeerMethod(make, settings.nbytes)


def sgp(settings, ranks):
    """Return SGP's ranks, on the directed exponential graph."""
    phases = [
        graphs.neighbor_lists(edges, ranks)
        for edges in graphs.exponential_phases(ranks, settings.neighbors)
    ]

    def make(port, rank, size):
        destinations = [outgoing[rank] for outgoing, _ in phases]
        sources = [incoming[rank] for _, incoming in phases]
        return PushSumProtocol(port, rank, size, destinations, sources, 1)

    return PeerMethod(make, settings.nbytes)


def ad_psgd(settings, ranks):
    """Return AD-PSGD's ranks; without a graph any two may average."""
    neighbors = None
    if settings.graph is not None:
        neighbors, _ = graphs.neighbor_lists(graphs.edges_of(settings.graph, ranks), ranks)

    def make(port, rank, size):
        others = [other for other in range(size) if other != rank]
        chosen = others if neighbors is None else neighbors[rank]
        return PairwiseAverageProtocol(port, rank, size, chosen, settings.seed)

    return PeerMethod(make, settings.nbytes)


def parameter_server(settings, ranks):
    """Return the ranks and their parameter server: rank 0, or one on a machine of its own.

    Raises:
        ValueError: as many backups as ranks.
    """
    if settings.backups >= ranks:
        raise ValueError(f"backups is {settings.backups}, not between 0 and {ranks - 1}")
    alone = bool(settings.dedicated_server)
    server = ranks if alone else 0
    # Of all ranks of the protocol a round omits the backups, and a server without an application.
    omitted = settings.backups + alone

    def make(port, rank, size):
        mode = settings.mode or "bsp"
        return ParameterServerProtocol(port, rank, size, mode, server, omitted)

    return PeerMethod(make, settings.nbytes, alone)
