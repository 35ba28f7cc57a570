"""Simulates methods in which a controller or a schedule forms groups.

It does what `collectives.engine.formed_groups` does over MPI, at the times of the machine's model;
all decisions are those of a `GroupProtocol` and of `collectives.protocols.group_rank`. Vectors have
values if ranks train: see `wagma.simulation.group_parts`.
"""

from collectives.memory.layout cimport Layout
from collectives.protocols.formed_groups cimport Group
from collectives.protocols.paces cimport NEVER
from collectives.protocols.rank cimport WAIT
from wagma.simulation.core cimport placed_allreduce_time
from wagma.simulation.group_port cimport (
    CAME,
    EXCHANGED,
    OPERATION,
    PASSED,
    STAGED,
    GroupsMethod,
    SimulatedGroupPort,
    nanoseconds,
)
from wagma.simulation.operations cimport Operations
from wagma.simulation.values cimport Average


cdef class FormedGroupMethod(GroupsMethod):
    """The ranks of such a protocol.

    A group's average begins once its last member takes part in it. On a machine of two levels its
    members share their nodes' injection limits with those that average across nodes at that time;
    later ones do not slow it down.

    Args:
        make: function of (port, rank, size) that returns the rank's protocol; None: ranks `attach`
            theirs.
        nbytes: length of the vector, in bytes.
        sync_every: calls from one average of a rank to its next.
        layout: of the vectors, if they have values.
        sharing: whether the ranks of a node average in memory that they share; it changes the order
            of additions, not the times.

    Attributes:
        most: the largest number of groups that averaged at the same time.
        operations: the `Operations` of ranks that train.
        log: a list to which the members of each group that has averaged are added, by the end of
            its average, and `times` one for these ends, in seconds; None, the default, for neither.
    """

    cdef object make
    cdef long long nbytes, sync_every
    cdef double staging_time
    # Number of members of each group that have begun, by the group's number.
    cdef dict present
    # Of each node: number of its ranks that average with other nodes now.
    cdef list crossing
    cdef int under_way
    cdef readonly int most
    cdef public list log
    cdef readonly list times
    cdef Layout layout
    cdef bint sharing
    cdef Average average
    cdef readonly Operations operations

    def __init__(self, make, nbytes, sync_every=1, Layout layout=None, sharing=False):
        self.make, self.nbytes, self.sync_every = make, nbytes, sync_every
        self.layout, self.sharing = layout, sharing
        self.updates = 0
        self.present = {}
        self.times = []

    cpdef begin(self):
        cdef SimulatedGroupPort port
        cdef int rank, size = self.simulation.ranks
        self.staging_time = self.nbytes / <double>self.simulation.machine.staging
        self.crossing = [0] * (self.simulation.node_of[size - 1] + 1)
        self.ports = [
            SimulatedGroupPort(self.simulation, rank, self.layout) for rank in range(size)]
        if self.layout is not None:
            self.average = Average(self.layout, size)
            self.operations = Operations(
                self.simulation, self.layout, self.nbytes, OPERATION)
            return
        for port in self.ports:
            port.protocol = self.make(port, port.rank, size)
            port.protocol.sync_every = self.sync_every
            port.deciding.attach(port, port.protocol)
        for port in self.ports:
            port.deciding.begin()
            port.proceed()

    def protocol(self, rank):
        """Return a rank's protocol."""
        return self.ports[rank].protocol

    def port(self, rank):
        """Return a rank's port."""
        return self.ports[rank]

    cpdef arrives(self, int rank):
        self.simulation.later(self.staging_time, STAGED, rank)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef SimulatedGroupPort port = <SimulatedGroupPort>self.ports[rank]
        cdef Group group
        if kind >= OPERATION:
            self.operations.happens(kind, rank)
            return
        port.protocol.passed(nanoseconds(self.simulation.now))
        if kind == STAGED:
            port.deciding.call()
        elif kind == CAME:
            port.protocol.arrived(<int>a, port.coming[a].popleft())
        elif kind == PASSED:
            port.told_at = NEVER
            if nanoseconds(self.simulation.now) >= port.protocol.due:
                port.protocol.fell_due()
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
        port.proceed()

    cdef void end_call(self, SimulatedGroupPort port):
        self.simulation.returns(port.rank, self.staging_time)
        if self.simulation.is_done(port.rank):
            port.protocol.leave()

    cdef void take_part(self, Group group):
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
        if self.layout is not None and group.size > 1:
            self._exchange(group, self.sharing and nodes.count(nodes[0]) == group.size)
        self._share(nodes, 1)
        sharing = {node: max(1, self.crossing[node]) for node in nodes}
        time = placed_allreduce_time(
            self.simulation.machine, nodes, self.nbytes, False, sharing)
        for i in range(group.size):
            self.simulation.later(time, EXCHANGED, group.members[i])

    cdef void _exchange(self, Group group, bint together):
        """Average the members' vectors, now that all have begun the exchange."""
        cdef int i
        self.average.begin()
        for i in range(group.size):
            (<SimulatedGroupPort>self.ports[group.members[i]]).contribute(self.average)
        self.average.compute(together)
        for i in range(group.size):
            (<SimulatedGroupPort>self.ports[group.members[i]]).take(self.average)

    cdef list _nodes_of(self, Group group):
        """Return the node of each member, in the order of their ranks."""
        cdef int rank
        return [self.simulation.node_of[rank] for rank in sorted(group.listed()[0])]

    cdef void _share(self, list nodes, int change):
        """Note that an average of ranks on these nodes begins (1), or that it has ended (−1)."""
        if nodes.count(nodes[0]) < len(nodes):
            for node in nodes:
                self.crossing[node] += change
