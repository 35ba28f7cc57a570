"""The methods in simulated time once more, in plain Python, to compare `wagma.simulation` with.

They drive the protocols' sources. WAGMA-SGD takes the groups from `topology.groups`, and checks of
every run that each rank executes every version once, in order, and is never far from the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict

from peer_network import peers
from protocol_messages import all_ranks, protocols

from collectives.topology import activation_peers, groups, propagation_bound, shuffle
from wagma.simulation.core import placed_allreduce_time

ACTIVATION = 16
MESSAGE = 64


class Rank:
    """One rank: its protocol, its application, and when its engine and its port are free."""

    def __init__(self, number, peers, settings):
        self.number, self.peers = number, [destination for destination, _ in peers]
        self.protocol = protocols.WaitAvoidingProtocol(
            len(peers), settings.group_size, settings.sync_period, settings.wait == "nobody"
        )
        self.computing, self.calling, self.published, self.copying = True, False, False, False
        self.moving = self.exchanging = False
        self.made, self.waited, self.called_at = 0, 0.0, 0.0
        self.engine_free = self.port_free = self.port_open = 0.0
        self.published_version = -1
        self.executed = []
        # Whether the snapshot is the vector that the application continues from; seconds of the
        # copies after an exchange.
        self.returned, self.after = True, 0.0


class Network:
    """What happens when, and messages between engines: afterwards `wall` and `messages` say how.

    Its `ranks` have a `number`; whether they are `computing`; when they are `engine_free`, and when
    their port is `port_free` to send and `port_open` to receive; how many steps they have `made`;
    when they `called_at`, and how long they `waited`. The last ones may be `servers`, each on a
    node of its own, which have no application.
    """

    def __init__(self, step_times, machine, settings, servers=0):
        self.times, self.settings = step_times, settings
        self.steps, self.size = step_times.shape
        self.machine = machine.for_job(self.size, servers)
        self.node_free, self.node_open = defaultdict(float), defaultdict(float)
        self.heap, self.order = [], itertools.count()
        self.messages = 0
        self.now, self.wall = 0.0, 0.0

    def run(self):
        while not all(self.is_done(rank) for rank in self.ranks):
            self.now, _, happens, arguments = heapq.heappop(self.heap)
            happens(*arguments)
            self.check()
        return self

    def check(self):
        """Raise AssertionError where something is wrong."""

    def push(self, at, happens, *arguments):
        heapq.heappush(self.heap, (at, next(self.order), happens, arguments))

    def is_done(self, rank):
        """Whether a rank has made, or skipped, all iterations."""
        if rank.number >= self.size:
            return True
        return rank.made + getattr(rank.protocol, "skipped", 0) >= self.steps

    def compute(self, rank, at):
        rank.computing = True
        if not self.is_done(rank):
            self.push(at + self.times[rank.made, rank.number], self.computed, rank)

    def transmit(self, rank, destination, nbytes, taken, *arguments):
        """Send a message; once it is taken by the engine of its destination, call this of it."""
        machine = self.machine
        latency, byte_gap = machine.within
        wire = (nbytes - 1) * byte_gap
        rank.engine_free = max(self.now, rank.engine_free) + machine.overhead
        at = max(rank.engine_free, rank.port_free)
        node = self.node_of(rank)
        link = 0.0
        if node != self.node_of(destination):
            latency = machine.latency
            link = nbytes * (1 / machine.injection)
            at = max(at, self.node_free[node])
            self.node_free[node] = at + link
            wire = max((nbytes - 1) * machine.byte_gap, link)
        rank.port_free = at + wire + machine.gap
        self.messages += 1
        order, last = next(self.order), at + wire + latency
        received = destination, order, last, link, taken, arguments
        heapq.heappush(self.heap, (at + latency, order, self.comes, received))

    def node_of(self, rank):
        if rank.number < self.size:
            return rank.number // self.machine.ranks_per_node
        return "of server", rank.number

    def comes(self, rank, order, last, link, taken, arguments):
        """The first byte of a message has come; the last does in order among those of its time."""
        begins = max(self.now, rank.port_open)
        if link:
            node = self.node_of(rank)
            begins = max(begins, self.node_open[node])
            self.node_open[node] = begins + link
        at = last + (begins - self.now)
        rank.port_open = at + self.machine.gap
        heapq.heappush(self.heap, (at, order, self.arrived, (rank, taken, arguments)))

    def arrived(self, rank, taken, arguments):
        if rank.computing and self.machine.response > 0:
            self.push(self.now + self.machine.response, self.noticed, rank, taken, arguments)
        else:
            self.noticed(rank, taken, arguments)

    def noticed(self, rank, taken, arguments):
        rank.engine_free = max(self.now, rank.engine_free) + self.machine.overhead
        self.push(rank.engine_free, taken, rank, *arguments)


class Tree:
    """One rank's activations on their way."""

    def __init__(self, network, rank):
        self.network, self.rank = network, rank

    def send_activation(self, dimension, version, ops):
        network, destination = self.network, self.network.ranks[self.rank.peers[dimension]]
        message = version, ops, dimension
        network.transmit(self.rank, destination, ACTIVATION, network.told, message)


class Reference(Network):
    """A run of WAGMA-SGD: also `staleness`, `timely` and `calls` say how it went."""

    def __init__(self, step_times, machine, settings):
        super().__init__(step_times, machine, settings)
        size = len(step_times[0])
        self.conserving = settings.late != "paper"
        self.copy = settings.nbytes / self.machine.memory
        self.ranks = [Rank(r, activation_peers(r, size), settings) for r in range(size)]
        self.present = Counter()
        self.entered = self.moving = self.timely = self.calls = 0
        self.staleness = Counter()
        for rank in self.ranks:
            rank.protocol.attach(Tree(self, rank))
            self.compute(rank, 0.0)

    def check(self):
        next_versions = [rank.protocol.next for rank in self.ranks]
        if self.settings.group_size > 1 and self.settings.groups == "changing":
            bound = propagation_bound(len(self.ranks), self.settings.group_size)
            assert max(next_versions) - min(next_versions) <= bound
        for rank in self.ranks:
            assert rank.executed == list(range(len(rank.executed)))

    def allreduce_time(self, members, nbytes, doubling=False):
        nodes = [member // self.machine.ranks_per_node for member in members]
        return placed_allreduce_time(self.machine, nodes, nbytes, doubling)

    def group(self, rank, version):
        """Members in the protocol's order, which decides what of equal times happens first."""
        fixed = self.settings.groups == "fixed"
        ordered = shuffle(len(self.ranks), self.settings.group_size, fixed)
        members = tuple(ordered.members(rank.number, version))
        formed = groups(len(self.ranks), self.settings.group_size, 0 if fixed else version)
        assert tuple(sorted(members)) in formed
        return members

    # The application

    def computed(self, rank):
        rank.computing, rank.calling, rank.called_at = False, True, self.now
        if not rank.protocol.is_synchronous():
            rank.protocol.call()
            self.react(rank)
            return
        rank.protocol.enter(all_ranks.SYNC)
        self.react(rank)
        self.entered += 1
        if self.entered == len(self.ranks):
            self.entered = 0
            seconds = self.allreduce_time(range(len(self.ranks)), ACTIVATION)
            for each in self.ranks:
                self.push(self.now + seconds, self.agreed, each)

    def returns(self, rank):
        rank.calling = rank.published = False
        rank.waited += self.now - rank.called_at
        rank.made += 1
        self.wall = max(self.wall, self.now)
        self.compute(rank, self.now)

    # The engine

    def react(self, rank):
        protocol = rank.protocol
        for dimension in range(len(rank.peers)):
            if protocol.due_on() >> dimension & 1:
                protocol.send_on(dimension)
        if protocol.vectors == protocols.RUNNING and not rank.exchanging:
            self.begin(rank)
        elif rank.copying:
            return
        elif protocol.stage == all_ranks.REDUCING:
            self.begin_moving(rank)
        elif rank.calling and protocol.vectors == protocols.HELD:
            self.serve(rank)

    def told(self, rank, message):
        rank.protocol.activate(*message)
        self.react(rank)

    def begin(self, rank):
        """Note what rank copies: X for later versions, a second mean, or what a mean replaces."""
        version, passive = rank.protocol.running, self.settings.wait == "nobody"
        direct = rank.published and rank.protocol.timely
        rank.exchanging = True
        rank.after = self.copy * (passive and self.conserving and (direct or rank.returned))
        if direct and passive and not self.conserving:
            self.push(self.now + self.copy, self.ready, rank, version)
        else:
            self.ready(rank, version)

    def ready(self, rank, version):
        group = self.group(rank, version)
        self.present[version, group] += 1
        if self.present[version, group] == len(group):
            settings = self.settings
            seconds = self.allreduce_time(group, settings.nbytes, settings.doubling)
            for member in map(self.ranks.__getitem__, group):
                self.push(self.now + (seconds + member.after), self.exchanged, member, version)

    def exchanged(self, rank, version):
        assert rank.protocol.running == version
        rank.exchanging = rank.returned = False
        rank.executed.append(version)
        self.staleness[version - rank.published_version] += 1
        rank.protocol.finished()
        self.react(rank)

    def serve(self, rank):
        staging = self.settings.nbytes / self.machine.staging
        rank.copying = True
        if not rank.protocol.timely:
            # It adds its change, or replaces its snapshot, and merges or copies the mean.
            self.push(self.now + (2 * self.copy + 2 * staging), self.taken, rank)
        elif not rank.published:
            assert rank.returned or not self.conserving
            self.push(self.now + staging, self.has_published, rank)
        else:
            self.push(self.now + staging, self.taken, rank)

    def has_published(self, rank):
        rank.copying, rank.published = False, True
        rank.published_version = rank.protocol.version
        rank.protocol.published()
        self.react(rank)

    def taken(self, rank):
        protocol = rank.protocol
        rank.copying, rank.returned = False, True
        self.calls += 1
        self.timely += protocol.timely
        if not protocol.timely:
            assert protocol.source >= protocol.version
            rank.published_version = protocol.version
        protocol.returns()
        self.returns(rank)
        self.react(rank)

    def agreed(self, rank):
        records = [(all_ranks.SYNC, each.protocol.version) for each in self.ranks]
        rank.protocol.agreed([value for pair in records for value in pair], len(records))
        self.react(rank)

    def begin_moving(self, rank):
        if rank.moving:
            return
        rank.moving = True
        if self.conserving and not rank.returned and self.copy > 0:
            self.push(self.now + self.copy, self.moves, rank)  # it adds its change
        else:
            self.moves(rank)

    def moves(self, rank):
        self.moving += 1
        if self.moving == len(self.ranks):
            self.moving = 0
            settings = self.settings
            everybody = range(len(self.ranks))
            seconds = self.allreduce_time(everybody, settings.nbytes, settings.doubling)
            seconds += 2 * (settings.nbytes / self.machine.staging)
            for each in self.ranks:  # the mean is written to the snapshot and to the model
                self.push(self.now + (seconds + self.copy), self.reduced, each)

    def reduced(self, rank):
        rank.moving, rank.returned = False, True
        rank.executed.append(rank.protocol.version)
        rank.published_version = rank.protocol.version
        rank.protocol.reduced()
        self.returns(rank)
        self.react(rank)


class MessageRank(peers.Port):
    """One rank of a method of messages: the port of its protocol, and how long things take."""

    def __init__(self, number, reference):
        self.number, self.reference = number, reference
        self.made, self.waited, self.called_at = 0, 0.0, 0.0
        self.engine_free = self.port_free = self.port_open = 0.0
        self.weights, self.coming = defaultdict(list), defaultdict(list)

    def pass_through(self, passes):
        reference = self.reference
        began = max(reference.now, self.engine_free)
        self.engine_free = began + passes * (reference.settings.nbytes / reference.machine.memory)

    def write(self, kind, number):
        self.message, self.nbytes = (kind, number, 0), MESSAGE

    def write_model(self, kind, number, weight):
        self.message, self.nbytes = (kind, number, weight), MESSAGE + self.reference.settings.nbytes

    def write_change(self, kind, number, weight):
        self.write_model(kind, number, weight)

    def post(self, destination):
        self.reference.send(self, self.reference.ranks[destination])

    def mix(self, source, keep, share):
        self.pass_through(1)
        return self.weights[source].pop(0) if self.weights[source] else 0

    def halve(self, source, kind, number):
        self.pass_through(2)
        self.message, self.nbytes = (kind, number, 0), MESSAGE + self.reference.settings.nbytes
        self.post(source)

    def drop(self, source):
        pass

    def scale(self, factor):
        if factor != 1:
            self.pass_through(1)

    def look_ahead(self, momentum):
        self.pass_through(3 if momentum else 1)

    def publish(self, scale):
        self.pass_through(1)

    def return_model(self, scale):
        self.pass_through(1)
        self.reference.returns(self)


class MessageReference(Network):
    """A run of a method of messages.

    Args:
        make: function of (port, rank, size) that returns the protocol.
        servers: number of ranks, the last ones, that make no steps.
    """

    def __init__(self, step_times, machine, settings, make, servers=0):
        super().__init__(step_times, machine, settings, servers)
        size = self.size + servers
        self.staging = settings.nbytes / self.machine.staging
        self.ranks = [MessageRank(number, self) for number in range(size)]
        for rank in self.ranks:
            rank.protocol = make(rank, rank.number, size)
        for rank in self.ranks:
            rank.computing = rank.number < self.size
            rank.protocol.begin()
        for rank in self.ranks[self.size :]:
            self.leave(rank)
        for rank in self.ranks[: self.size]:
            self.compute(rank, 0.0)

    def computed(self, rank):
        rank.computing, rank.called_at = False, self.now
        self.push(self.now + self.staging, self.staged, rank)

    def staged(self, rank):
        rank.protocol.call()
        self.leave(rank)

    def send(self, rank, destination):
        destination.coming[rank.number].append(rank.message)
        self.transmit(rank, destination, rank.nbytes, self.taken, rank.number)

    def taken(self, rank, source):
        kind, number, weight = rank.coming[source].pop(0)
        if weight != 0:
            rank.weights[source].append(weight)
        rank.protocol.arrived(source, kind, number, weight)
        self.leave(rank)

    def returns(self, rank):
        at = self.now + (rank.engine_free - self.now + self.staging)
        rank.waited += at - rank.called_at
        rank.made += 1
        self.wall = max(self.wall, at)
        self.compute(rank, at)

    def leave(self, rank):
        if self.is_done(rank) and not rank.protocol.leaving:
            rank.protocol.leave(failed=False)
