"""Simulates the methods whose ranks send each other vectors.

It does what `collectives.engine.mailbox` does over MPI, at the times of the machine's model; all
decisions are those of a `PeerProtocol` and of `collectives.protocols.peer_rank`. Vectors have values
if ranks train: see `wagma.simulation.peer_parts`.
"""

from collections import deque

from collectives.memory.allocation cimport Memory
from collectives.memory.layout cimport HEADER, Layout
from collectives.protocols.peer_rank cimport PeerRankPort, PeerRankProtocol
from collectives.protocols.peers cimport PeerProtocol
from wagma.simulation.core cimport Method, Simulation
from wagma.simulation.operations cimport Operations
from wagma.simulation.peer_vectors cimport PeerVectors

cdef enum:
    # Events: an application's vector has been staged in the engine's memory; a message has arrived;
    # and the first of those of operations of all ranks.
    STAGED
    CAME
    OPERATING
    # Bytes of a message without a vector.
    SHORT = 64

cdef enum Goal:
    # What an application waits for: nothing; the return of its call; that what it has requested is
    # complete; that nothing which its rank has begun is in progress.
    NOTHING
    RETURNED
    ANSWERED
    QUIET


cdef class SimulatedPort(PeerRankPort):
    """The actions of one rank's engine, and the time that they take.

    Scaling a vector, and adding one to another, each take one pass at the machine's memory
    bandwidth; sending, recording a change, and saving what the application got take none. Later
    messages of the engine, and the return of the model to its application, wait for these passes.

    Attributes:
        protocol: the rank's, set by `attach`.
        deciding: the `PeerRankProtocol` whose port it is.
        bytes_sent: bytes of vectors sent.
    """

    cdef Simulation simulation
    cdef readonly PeerProtocol protocol
    cdef readonly PeerRankProtocol deciding
    cdef readonly long long bytes_sent
    cdef PeerVectors vectors
    cdef Goal goal
    cdef int rank, kind
    cdef long long number, nbytes, length, skipped
    cdef double weight, pass_time, staging_time
    # What `post` sends with the message; None: nothing, or vectors have no values.
    cdef Memory written
    # By source, oldest first: the messages in flight, and of those not used yet the weights and
    # vectors, if they have any.
    cdef dict coming, kept

    def __init__(self, Simulation simulation, int rank, long long nbytes):
        self.simulation, self.rank, self.length = simulation, rank, nbytes
        self.pass_time = nbytes / <double>simulation.machine.memory
        self.staging_time = nbytes / <double>simulation.machine.staging
        self.coming, self.kept = {}, {}
        self.skipped = 0
        self.deciding = PeerRankProtocol(self)

    cpdef attach(self, PeerProtocol protocol):
        """Act for this protocol of the rank."""
        self.protocol = protocol
        self.deciding.attach(protocol)

    cdef void take_time(self, int passes) noexcept nogil:
        """Keep the engine busy for this number of consecutive passes over a vector."""
        cdef double began = max(self.simulation.now, self.simulation.engine_free[self.rank])
        self.simulation.engine_free[self.rank] = began + passes * self.pass_time

    # Messages

    cdef void write(self, int kind, long long number) noexcept nogil:
        self.kind, self.number, self.weight, self.nbytes = kind, number, 0, SHORT
        if self.vectors is not None:
            with gil:
                self.written = None

    cdef void write_model(self, int kind, long long number, double weight) noexcept nogil:
        self.write_vector(kind, number, weight, False)

    cdef void write_change(self, int kind, long long number, double weight) noexcept nogil:
        self.write_vector(kind, number, weight, True)

    cdef void write_vector(
        self, int kind, long long number, double weight, bint changes
    ) noexcept nogil:
        self.kind, self.number, self.weight, self.nbytes = kind, number, weight, SHORT + self.length
        if self.vectors is not None:
            with gil:
                self.written = self.vectors.copy_of(changes)

    cdef void post(self, int destination) noexcept nogil:
        with gil:
            self.send(destination)

    cdef void send(self, int destination):
        cdef SimulatedPort other = (<PeerMethod>self.simulation.method).ports[destination]
        message = self.kind, self.number, self.weight, self.deciding.epoch, self.written
        other.coming.setdefault(self.rank, deque()).append(message)
        if self.written is not None:
            self.bytes_sent += self.vectors.layout.size - HEADER
        self.simulation.send(self.rank, destination, self.nbytes, CAME, self.rank)

    cdef void come(self, int source):
        """Take the oldest message from this rank: an engine that polls finds earlier ones, too."""
        cdef double weight
        kind, number, weight, epoch, vector = self.coming[source].popleft()
        if not self.deciding.counts(kind, epoch):
            return
        if weight != 0 or vector is not None:
            self.kept.setdefault(source, deque()).append((weight, vector))
        self.protocol.arrived(source, kind, number, weight)

    cdef double mix(self, int source, double keep, double share) noexcept nogil:
        self.take_time(1)
        with gil:
            if self.kept:
                weight, vector = self.kept[source].popleft()
                if vector is not None:
                    self.vectors.mix(vector, keep, share)
                return <double>weight
        return 0

    cdef void halve(self, int source, int kind, long long number) noexcept nogil:
        self.take_time(2)
        self.kind, self.number, self.weight, self.nbytes = kind, number, 0, SHORT + self.length
        if self.vectors is not None:
            with gil:
                _, vector = self.kept[source].popleft()
                self.written = self.vectors.halve(vector)
        self.post(source)

    cdef void drop(self, int source) noexcept nogil:
        if self.vectors is not None:
            with gil:
                self.kept[source].popleft()

    # Vectors

    cdef void scale(self, double factor) noexcept nogil:
        self.take_time(1)
        if self.vectors is not None:
            self.vectors.scale(self.vectors.model, self.vectors.model, factor)

    cdef void look_ahead(self, double momentum) noexcept nogil:
        self.take_time(1 if momentum == 0 else 3)
        if self.vectors is not None:
            with gil:
                self.vectors.look_ahead(momentum)

    cdef void publish(self, double scale) noexcept nogil:
        self.take_time(1)
        if self.vectors is not None:
            self.vectors.layout.combine(self.vectors.model, 1, self.vectors.change, scale)

    cdef void replace(self) noexcept nogil:
        self.take_time(1)
        if self.vectors is not None:
            self.vectors.layout.copy(self.vectors.model, self.vectors.user.arrays)

    cdef void record(self, bint against_model) noexcept nogil:
        if self.vectors is not None:
            self.vectors.record(against_model)

    cdef void save(self) noexcept nogil:
        if self.vectors is not None:
            self.vectors.layout.copy(self.vectors.change, self.vectors.model)

    cdef void clear(self) noexcept nogil:
        self.vectors.layout.zero(self.vectors.change)

    cdef void keep(self) noexcept nogil:
        self.hold()

    cdef void hold(self) noexcept nogil:
        self.vectors.layout.copy(self.vectors.change, self.vectors.user.arrays)

    cdef void load(self) noexcept nogil:
        self.vectors.layout.copy(self.vectors.model, self.vectors.user.arrays)
        with gil:
            self.kept = {}

    cdef bint adopt(self) noexcept nogil:
        """Nothing is pending: actions are executed at once."""
        return False

    cdef bint answers(self) noexcept nogil:
        return False

    cdef bint is_change_finite(self, bint against_model) noexcept nogil:
        return self.vectors is None or self.vectors.is_change_finite(against_model)

    cdef void keep_model(self, double scale) noexcept nogil:
        self.skipped = self.protocol.skipped
        self.vectors.return_model(scale, False)

    cdef void return_model(self, double scale) noexcept nogil:
        """Return the model to the application once all passes are complete."""
        cdef int iterations = 1 + self.protocol.skipped - self.skipped
        self.skipped = self.protocol.skipped
        self.take_time(1)
        if self.vectors is not None:
            self.vectors.return_model(scale, True)
        with gil:
            self.give_back(self.staging_time, iterations)

    cdef void give_back(self, double after, int iterations):
        """Let the application's wait end once all passes are complete, and this time later."""
        cdef double ready = self.simulation.engine_free[self.rank] - self.simulation.now
        self.goal = NOTHING
        self.simulation.returns(self.rank, max(ready, 0) + after, iterations)

    cdef bint awaits(self, Goal goal):
        """Let the application wait for a goal, unless it is reached; return whether it does."""
        self.goal = goal
        if self.reached():
            self.goal = NOTHING
        return self.goal != NOTHING

    cdef bint reached(self):
        """Return whether the application's wait has ended, maybe in vain."""
        if self.protocol.missing >= 0:
            return True
        if self.goal == QUIET:
            return self.protocol.is_quiet()
        return self.goal == ANSWERED and self.deciding.has_answered()


cdef class PeerMethod(Method):
    """The ranks of a protocol of `collectives.protocols.peers`.

    Args:
        make: function of (port, rank, size) that returns a protocol; None: `attach` sets them.
        nbytes: length of the model, in bytes.
        servers: number of ranks of the protocol, the last ones, whose applications make no calls.
        layout: of the vectors that all ranks average, if they have values; see `initialize`.
        periods: for each rank, of how many steps only the last one calls; None: each does.
        dynamic: whether these are the fastest rank's, of a parameter server, and others make as
            many as they can in the same time.

    Attributes:
        operations: the ranks' `Operations`, if vectors have values.
        ports: the ranks' `SimulatedPort`s.
    """

    cdef object make, periods
    cdef bint dynamic
    # By rank, since its last call: the steps made, the time that they took, and the steps due.
    cdef list made, took, due
    cdef long long nbytes
    cdef readonly list ports
    cdef readonly Operations operations
    cdef Layout layout
    cdef int attached

    def __init__(
        self, make, nbytes, servers=0, Layout layout=None, periods=None, bint dynamic=False
    ):
        self.make, self.nbytes, self.servers = make, nbytes, servers
        self.layout, self.periods, self.dynamic = layout, periods, dynamic
        if periods is not None:
            self.made, self.took = [0] * len(periods), [0.0] * len(periods)
            self.due = list(periods)

    cpdef begin(self):
        cdef int rank, size = self.simulation.engines
        cdef SimulatedPort port
        self.ports = [SimulatedPort(self.simulation, rank, self.nbytes) for rank in range(size)]
        if self.layout is not None:
            self.operations = Operations(self.simulation, self.layout, self.nbytes, OPERATING)
        if self.make is None:
            return
        for port in self.ports:
            port.attach(self.make(port.deciding, port.rank, size))
        self._begin_all()
        for rank in range(self.simulation.ranks, size):
            port = <SimulatedPort>self.ports[rank]
            port.protocol.leave(False)

    cdef void _begin_all(self):
        cdef SimulatedPort port
        for port in self.ports:
            port.protocol.begin()

    def protocol(self, rank):
        """Return a rank's protocol."""
        return self.ports[rank].protocol

    # What applications that train call, by `wagma.simulation.peer_parts`

    def initialize(self, int rank, vector, Layout layout):
        """Begin with this list of arrays of a rank, of this layout."""
        (<SimulatedPort>self.ports[rank]).vectors = PeerVectors(layout, vector)

    def attach(self, int rank, protocol):
        """Let a rank act by this protocol; the protocols begin once every rank has one."""
        (<SimulatedPort>self.ports[rank]).attach(protocol)
        self.attached += 1
        if self.attached == len(self.ports):
            self._begin_all()

    def begin_call(self, int rank, vector):
        """Begin a call with this vector."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        port.goal = RETURNED
        self.arrives(rank)

    def end_call(self, int rank):
        """End a call or request, after which its vector is not used any more."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.deciding.interrupt()
        port.vectors.user = None

    def publish_change(self, int rank, vector):
        """Publish the application's change; it continues from this vector."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        port.deciding.publish_change()

    def go_on_from(self, int rank, vector):
        """Note that the application holds this vector, which is what it got except for rounding."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        port.deciding.go_on_from()

    def restart(self, int rank, vector, long long calls):
        """Continue from this vector with so many calls made, as all ranks do at the same time."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        port.deciding.restart(calls)

    def read_model(self, int rank, vector):
        """Overwrite the vector with the model, as calls return it."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        port.vectors.read_model(port.protocol.factor())

    def resume(self, int rank):
        """Note that a rank's application makes calls again."""
        (<SimulatedPort>self.ports[rank]).protocol.resume()

    def leave(self, int rank):
        """Note that a rank's application makes no more calls."""
        (<SimulatedPort>self.ports[rank]).protocol.leave(False)

    # These return whether the application is to wait for what it requests

    def pause(self, int rank):
        """Begin nothing new between ranks, and wait for what this one has begun."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.protocol.pause()
        return port.awaits(QUIET)

    def hand_in(self, int rank, vector):
        """Hand in the application's change since its last call, outside of any call."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        port.deciding.hand_in()
        return port.awaits(ANSWERED)

    def join(self, int rank, vector):
        """Make no more calls, except those that others need, until all ranks have joined."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.vectors.give(vector)
        return port.deciding.join() and port.awaits(ANSWERED)

    def catch_up(self, int rank, long long calls):
        """Make as many calls as the rank that has made the most, once all have joined."""
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        port.protocol.catch_up(calls)
        return port.awaits(ANSWERED)

    def caught_up(self, int rank):
        """Publish the change that none of these calls has included."""
        (<SimulatedPort>self.ports[rank]).deciding.caught_up()

    # Events

    cpdef arrives(self, int rank):
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        if self.periods is None or self.is_due(rank, port.protocol):
            self.simulation.later(port.staging_time, STAGED, rank)
        else:
            self.simulation.returns(rank)

    cdef bint is_due(self, int rank, protocol):
        """Count a step; return whether the rank sends an update after it."""
        if self.dynamic and self.made[rank] == 0:
            self.due[rank] = protocol.steps_beside(self.periods[rank])
        self.made[rank] += 1
        self.took[rank] += self.simulation.step_times[self.simulation.steps[rank], rank]
        if self.made[rank] < self.due[rank]:
            return False
        if self.dynamic and self.took[rank] > 0:
            protocol.speed = self.made[rank] / self.took[rank]
        self.made[rank], self.took[rank] = 0, 0.0
        return True

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef SimulatedPort port = <SimulatedPort>self.ports[rank]
        if kind == STAGED:
            port.deciding.call()
        elif kind == CAME:
            port.come(a)
        else:
            self.operations.happens(kind, rank)
        if port.goal != NOTHING and port.reached():
            port.give_back(0, 1)
        if self.simulation.is_done(rank) and not port.protocol.leaving:
            port.protocol.leave(False)
