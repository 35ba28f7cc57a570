"""WAGMA-SGD in simulated time once more, in plain Python, to compare `wagma.simulation` with.

It drives the protocol's source, takes the groups from `topology.groups`, and checks of every run
that each rank executes every version once, in order, and is never far from the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict

from protocol_messages import protocols

from collectives.topology import activation_peers, groups, propagation_bound
from wagma.simulation.core import allreduce_time

ACTIVATION = 16


class Rank:
    """One rank: its protocol, its application, and when its engine and its port are free."""

    def __init__(self, number, peers, settings):
        self.number, self.peers = number, [destination for destination, _ in peers]
        self.protocol = protocols.WaitAvoiding(
            len(peers), settings.group_size, settings.sync_period, settings.wait == "nobody"
        )
        self.computing, self.calling, self.published, self.copying = True, False, False, False
        self.moving = self.exchanging = False
        self.made, self.waited, self.called_at = 0, 0.0, 0.0
        self.engine_free = self.port_free = 0.0
        self.published_version = -1
        self.executed = []


class Reference:
    """A run: afterwards `wall`, `waited`, `staleness`, `timely`, `calls` and `messages` say how."""

    def __init__(self, step_times, machine, settings):
        self.times, self.settings = step_times, settings
        self.steps, size = step_times.shape
        self.machine = machine.for_job(size)
        self.ranks = [Rank(r, activation_peers(r, size), settings) for r in range(size)]
        self.node_free = defaultdict(float)
        self.heap, self.order = [], itertools.count()
        self.present, self.groups = Counter(), {}
        self.entered = self.moving = self.messages = self.timely = self.calls = 0
        self.staleness = Counter()
        self.now, self.wall = 0.0, 0.0
        for rank in self.ranks:
            self.push(step_times[0, rank.number], self.computed, rank)

    def run(self):
        while any(rank.made < self.steps for rank in self.ranks):
            self.now, _, happens, arguments = heapq.heappop(self.heap)
            happens(*arguments)
            self.check()
        return self

    def check(self):
        next_versions = [rank.protocol.next for rank in self.ranks]
        if self.settings.group_size > 1 and self.settings.groups == "changing":
            bound = propagation_bound(len(self.ranks), self.settings.group_size)
            assert max(next_versions) - min(next_versions) <= bound
        for rank in self.ranks:
            assert rank.executed == list(range(len(rank.executed)))

    def push(self, at, happens, *arguments):
        heapq.heappush(self.heap, (at, next(self.order), happens, arguments))

    def group(self, rank, version):
        if version not in self.groups:
            fixed = self.settings.groups == "fixed"
            formed = groups(len(self.ranks), self.settings.group_size, 0 if fixed else version)
            self.groups[version] = {member: group for group in formed for member in group}
        return self.groups[version][rank.number]

    # The application

    def computed(self, rank):
        rank.computing, rank.calling, rank.called_at = False, True, self.now
        if not rank.protocol.is_synchronous():
            rank.protocol.call()
            self.react(rank)
            return
        rank.protocol.enter(protocols.SYNC)
        self.react(rank)
        self.entered += 1
        if self.entered == len(self.ranks):
            self.entered = 0
            seconds = allreduce_time(self.machine, len(self.ranks), ACTIVATION)
            for each in self.ranks:
                self.push(self.now + seconds, self.agreed, each)

    def returns(self, rank):
        rank.calling = rank.published = False
        rank.waited += self.now - rank.called_at
        rank.made += 1
        rank.computing = True
        self.wall = max(self.wall, self.now)
        if rank.made < self.steps:
            self.push(self.now + self.times[rank.made, rank.number], self.computed, rank)

    # The engine

    def react(self, rank):
        protocol = rank.protocol
        for dimension in range(len(rank.peers)):
            if protocol.due >> dimension & 1:
                self.send(rank, dimension)
        protocol.due = 0
        if protocol.vectors == protocols.RUNNING and not rank.exchanging:
            self.begin(rank)
        elif rank.copying:
            return
        elif protocol.stage == protocols.MOVING:
            self.begin_moving(rank)
        elif rank.calling and protocol.vectors == protocols.HELD:
            self.serve(rank)

    def send(self, rank, dimension):
        machine, protocol = self.machine, rank.protocol
        destination = self.ranks[rank.peers[dimension]]
        wire = (ACTIVATION - 1) * machine.byte_gap
        rank.engine_free = max(self.now, rank.engine_free) + machine.overhead
        at = max(rank.engine_free, rank.port_free)
        node = rank.number // machine.ranks_per_node
        if node != destination.number // machine.ranks_per_node:
            at = max(at, self.node_free[node])
            self.node_free[node] = at + ACTIVATION * (1 / machine.injection)
            wire = max(wire, ACTIVATION * (1 / machine.injection))
        rank.port_free = at + wire + machine.gap
        self.messages += 1
        message = protocol.sent[dimension], protocol.sent_ops[dimension], dimension
        self.push(at + wire + machine.latency, self.arrived, destination, message)

    def arrived(self, rank, message):
        if rank.computing and self.machine.response > 0:
            self.push(self.now + self.machine.response, self.noticed, rank, message)
        else:
            self.noticed(rank, message)

    def noticed(self, rank, message):
        rank.engine_free = max(self.now, rank.engine_free) + self.machine.overhead
        self.push(rank.engine_free, self.told, rank, message)

    def told(self, rank, message):
        rank.protocol.tell(*message)
        self.react(rank)

    def begin(self, rank):
        version = rank.protocol.running
        group = self.group(rank, version)
        rank.exchanging = True
        self.present[version, group] += 1
        if self.present[version, group] == len(group):
            settings = self.settings
            seconds = allreduce_time(self.machine, len(group), settings.nbytes, settings.doubling)
            for member in group:
                self.push(self.now + seconds, self.exchanged, self.ranks[member], version)

    def exchanged(self, rank, version):
        assert rank.protocol.running == version
        rank.exchanging = False
        rank.executed.append(version)
        self.staleness[version - rank.published_version] += 1
        rank.protocol.finished()
        self.react(rank)

    def serve(self, rank):
        staging = self.settings.nbytes / self.machine.staging
        copy = self.settings.nbytes / self.machine.memory
        rank.copying = True
        if not rank.protocol.timely:
            self.push(self.now + 2 * (copy + staging), self.taken, rank)
        elif not rank.published:
            self.push(self.now + (copy + staging), self.has_published, rank)
        else:
            self.push(self.now + staging, self.taken, rank)

    def has_published(self, rank):
        rank.copying, rank.published = False, True
        rank.published_version = rank.protocol.t
        rank.protocol.published()
        self.react(rank)

    def taken(self, rank):
        protocol = rank.protocol
        rank.copying = False
        self.calls += 1
        self.timely += protocol.timely
        if not protocol.timely:
            assert protocol.source >= protocol.t
            rank.published_version = protocol.t
        protocol.returns()
        self.returns(rank)
        self.react(rank)

    def agreed(self, rank):
        records = [(protocols.SYNC, each.protocol.t) for each in self.ranks]
        rank.protocol.agreed([value for pair in records for value in pair], len(records))
        self.react(rank)

    def begin_moving(self, rank):
        if rank.moving:
            return
        rank.moving = True
        self.moving += 1
        if self.moving == len(self.ranks):
            self.moving = 0
            settings, machine = self.settings, self.machine
            seconds = allreduce_time(machine, len(self.ranks), settings.nbytes, settings.doubling)
            seconds += 2 * (settings.nbytes / machine.staging)
            for each in self.ranks:
                self.push(self.now + seconds, self.moved, each)

    def moved(self, rank):
        rank.moving = False
        rank.executed.append(rank.protocol.t)
        rank.published_version = rank.protocol.t
        rank.protocol.moved()
        self.returns(rank)
        self.react(rank)
