"""Simulates methods in which a controller or a schedule forms groups.

It does what `collectives.engine.formed_groups` does over MPI, at the times of the machine's model;
all decisions are those of a `GroupProtocol` and of `collectives.protocols.group_rank`.
"""

import array
from collections import deque

from libc.math cimport ceil

from collectives.protocols.formed_groups cimport Group, GroupProtocol
from collectives.protocols.group_rank cimport GroupRankPort, GroupRankProtocol
from collectives.protocols.paces cimport NEVER
from collectives.protocols.rank cimport CONTRIBUTE, RETURN, WAIT
from wagma.simulation.core cimport Method, Simulation, placed_allreduce_time
from wagma.simulation.vectors cimport NoVectors

cdef enum:
    # Events: an application's vector has been staged in the engine's memory; a message has arrived;
    # a group has averaged; the time may be one that a protocol is to be told of.
    STAGED
    CAME
    EXCHANGED
    PASSED


cdef class SimulatedGroupPort(GroupRankPort):
    """The actions of one rank's engine.

    Attributes:
        protocol: the rank's protocol.
        steps: queue of actions: groups to average in, and None for the return of the call.
        exchanged: whether the first of these groups has averaged.
        told_at: the time of the next event PASSED, in nanoseconds.
    """

    cdef Simulation simulation
    cdef readonly GroupProtocol protocol
    cdef GroupRankProtocol deciding
    cdef readonly int rank
    cdef readonly object steps
    cdef readonly bint exchanged
    cdef readonly long long told_at
    # By source, oldest first: the messages in flight.
    cdef dict coming

    def __init__(self, Simulation simulation, int rank):
        self.simulation, self.rank = simulation, rank
        self.steps, self.coming = deque(), {}
        self.told_at = NEVER
        self.deciding = GroupRankProtocol(NoVectors(), simulation.ranks)

    cdef void send(self, int destination, long long[::1] integers) noexcept nogil:
        with gil:
            self._send(destination, array.array("q", integers))

    cdef void _send(self, int destination, object integers):
        cdef SimulatedGroupPort other = (<FormedGroupMethod>self.simulation.method).ports[
            destination]
        other.coming.setdefault(self.rank, deque()).append(integers)
        self.simulation.send(self.rank, destination, 8 * len(integers), CAME, self.rank)

    cdef void reduce(self, Group group) noexcept nogil:
        with gil:
            self.steps.append(copy_of(group))

    cdef bint under_way(self, Group group) noexcept nogil:
        with gil:
            return self._under_way(group)

    cdef bint _under_way(self, Group group):
        cdef Group first
        cdef int i
        if not self.steps or self.steps[0] is None:
            return False
        first = self.steps[0]
        group.clear(first.number)
        for i in range(first.size):
            group.add(first.members[i], first.weights[i])
        return True

    cdef void return_model(self) noexcept nogil:
        with gil:
            self.steps.append(None)

    cdef int requested(self) noexcept nogil:
        with gil:
            if not self.steps:
                return WAIT
            return RETURN if self.steps[0] is None else CONTRIBUTE

    cdef void finish(self) noexcept nogil:
        with gil:
            self.steps.popleft()
            self.exchanged = False

    cdef bint is_under_way(self) noexcept nogil:
        with gil:
            return len(self.steps) > 0

    cdef long long now(self) noexcept nogil:
        return nanoseconds(self.simulation.now)

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        pass

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        """Return whether the pass has ended; a group of one rank ends in an event of its own."""
        with gil:
            if step == RETURN or self.steps[0].size > 1:
                return True
            self._take_part()
        return False

    cdef bint is_here(self) noexcept nogil:
        return True

    cdef bint knows_finite(self) noexcept nogil:
        return True

    cdef bint is_in_place(self) noexcept nogil:
        return False

    cdef void begin_average(self, long long number) noexcept nogil:
        with gil:
            self._take_part()

    cdef void _take_part(self):
        (<FormedGroupMethod>self.simulation.method)._take_part(self.steps[0])

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchanged

    cdef double total_weight(self) noexcept nogil:
        return 1

    cdef void changed(self) noexcept nogil:
        pass

    cdef void executed(self, long long number) noexcept nogil:
        pass

    cdef void returns(self, bint in_group) noexcept nogil:
        """Return after its vector is back from the engine's memory; after its last call it leaves.
        """
        with gil:
            (<FormedGroupMethod>self.simulation.method)._return(self)


cdef long long nanoseconds(double seconds) noexcept nogil:
    """Return a time as protocols have it, rounded up lest it be before one that they wait for."""
    return <long long>ceil(seconds * 1e9)


cdef Group copy_of(Group group):
    """Return a copy of the group's record."""
    cdef Group copy = Group(group.number, room=group.size)
    cdef int i
    for i in range(group.size):
        copy.add(group.members[i], group.weights[i])
    return copy


cdef class FormedGroupMethod(Method):
    """The ranks of such a protocol.

    A group's average begins once its last member takes part in it. On a machine of two levels its
    members share their nodes' injection limits with those that average across nodes at that time;
    later ones do not slow it down.

    Args:
        make: function of (port, rank, size) that returns the rank's protocol.
        nbytes: length of the vector, in bytes.
        sync_every: calls from one average of a rank to its next.

    Attributes:
        most: the largest number of groups that averaged at the same time.
        log: a list to which the members of each group that has averaged are added, by the end of
            its average, and `times` one for these ends, in seconds; None, the default, for neither.
    """

    cdef object make
    cdef long long nbytes, sync_every
    cdef double staging_time
    cdef list ports
    # Number of members of each group that have begun, by the group's number.
    cdef dict present
    # Of each node: number of its ranks that average with other nodes now.
    cdef list crossing
    cdef int under_way
    cdef readonly int most
    cdef public list log
    cdef readonly list times

    def __init__(self, make, nbytes, sync_every=1):
        self.make, self.nbytes, self.sync_every = make, nbytes, sync_every
        self.updates = 0
        self.present = {}
        self.times = []

    cpdef begin(self):
        cdef SimulatedGroupPort port
        cdef int rank, size = self.simulation.ranks
        self.staging_time = self.nbytes / <double>self.simulation.machine.staging
        self.crossing = [0] * (self.simulation.node_of[size - 1] + 1)
        self.ports = [SimulatedGroupPort(self.simulation, rank) for rank in range(size)]
        for port in self.ports:
            port.protocol = self.make(port, port.rank, size)
            port.protocol.sync_every = self.sync_every
            port.deciding.attach(port, port.protocol)
        for port in self.ports:
            port.deciding.begin()
            self._proceed(port)

    def protocol(self, rank):
        """Return a rank's protocol."""
        return self.ports[rank].protocol

    cpdef arrives(self, int rank):
        self.simulation.later(self.staging_time, STAGED, rank)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef SimulatedGroupPort port = <SimulatedGroupPort>self.ports[rank]
        cdef Group group
        port.protocol.passed(nanoseconds(self.simulation.now))
        if kind == STAGED:
            port.deciding.call()
        elif kind == CAME:
            port.protocol.arrived(<int>a, port.coming[a].popleft())
        elif kind == PASSED:
            port.told_at = NEVER
        else:
            group = port.steps[0]
            if group.members[0] == rank:
                self.under_way -= 1
                self._share(self._nodes_of(group), -1)
                self.updates += group.size > 1
                if self.log is not None:
                    self.log.append(group.listed()[0])
                    self.times.append(self.simulation.now)
            if port.deciding.passing == WAIT:
                port.exchanged = True
            else:
                port.deciding.passed()
        self._proceed(port)

    cdef void _return(self, SimulatedGroupPort port):
        self.simulation.returns(port.rank, self.staging_time)
        if self.simulation.steps[port.rank] == self.simulation.iterations:
            port.protocol.leave()

    cdef void _proceed(self, SimulatedGroupPort port):
        """Take a rank's next steps, and note when its protocol is to be told the time."""
        port.deciding.advance()
        if port.protocol.due < port.told_at:
            port.told_at = port.protocol.due
            self.simulation.later(
                max(port.told_at * 1e-9 - self.simulation.now, 0), PASSED, port.rank)

    cdef void _take_part(self, Group group):
        """Take part in an average; the last member begins it for all."""
        cdef int present = self.present.pop(group.number, 0) + 1
        cdef int i
        cdef double time
        if present < group.size:
            self.present[group.number] = present
            return
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        nodes = self._nodes_of(group)
        self._share(nodes, 1)
        sharing = {node: max(1, self.crossing[node]) for node in nodes}
        time = placed_allreduce_time(
            self.simulation.machine, nodes, self.nbytes, False, sharing)
        for i in range(group.size):
            self.simulation.later(time, EXCHANGED, group.members[i])

    cdef list _nodes_of(self, Group group):
        """Return the node of each member, in the order of their ranks."""
        cdef int rank
        return [self.simulation.node_of[rank] for rank in sorted(group.listed()[0])]

    cdef void _share(self, list nodes, int change):
        """Note that an average of ranks on these nodes begins (1), or that it has ended (−1)."""
        if nodes.count(nodes[0]) < len(nodes):
            for node in nodes:
                self.crossing[node] += change
