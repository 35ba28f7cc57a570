"""The collectives whose ranks send their vectors to one another: any of them, on any graph.

What must hold: the sum of all models changes by what ranks have changed alone, until `average`,
`synchronize` or `join` gives its mean to all, bit for bit the same. Elements that have changed
alike are alike, so no vector is torn.
"""

from __future__ import annotations

import random

import networkx
import numpy as np

from collectives import (
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PushSum,
    QueuedNeighborAverage,
)
from collectives.peers import PeerCollective

from .scenario import Scenario
from .sums import Sums
from .vectors import Shape, copied, digest, is_finite

KINDS = {
    "neighbors": NeighborAverage,
    "push-sum": PushSum,
    "pairs": PairwiseAverage,
    "server": ParameterServer,
    "queues": QueuedNeighborAverage,
}


def connected(plan, size, directed):
    """Return a random (strongly) connected graph of the ranks."""
    order = plan.sample(range(size), size)
    graph = networkx.DiGraph() if directed else networkx.Graph()
    graph.add_nodes_from(range(size))
    if size > 1:
        graph.add_edges_from(zip(order, order[1:] + order[:1]))
        for _ in range(plan.randrange(size)):
            graph.add_edge(*plan.sample(range(size), 2))
    return graph


class PeerProtocol(Scenario):
    """One of them: every rank calls, changes its vector, and all do something together."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan, size = self.plan, self.size
        self.kind = plan.choice(tuple(KINDS))
        self.shape = Shape(plan, size, exact=plan.random() < 0.5)
        self.given, self.weights = self._draw_given()
        self.joins = plan.random() < 0.4
        self.epochs = 2 if self.joins else 1
        self.poison = plan.choice((0, 0, 0.15))
        kinds = [None] * 7 + ["average", "synchronize", "load"]
        operations = [plan.choice(kinds) for _ in range(self.rounds)]
        self.operations = [None] * self.rounds if self.joins else operations
        calls = [[plan.randint(0, self.rounds) for _ in range(size)] for _ in range(self.epochs)]
        self.calls = calls if self.joins else [[self.rounds] * size]
        # Only the server's counts, where there is one.
        distinct = self.kind != "server" and plan.random() < 0.5
        self.starts = np.array(
            [np.full(self.shape.width, float(distinct * r)) for r in range(size)]
        )
        # So that engines that serve in calls alone have some to meet in.
        self.in_step = self.kind == "pairs" and not self.joins and plan.random() < 0.5
        self.steps = [self._draw_steps(script) for script in self.scripts]
        self.expected = self._work_out()
        self.tolerance = 8 * self.epochs * self.rounds * self.shape.rounding * self.bound

    def __str__(self):
        graph = self.given.get("graph")
        edges = graph if isinstance(graph, str) else graph and sorted(graph.edges)
        given = {**self.given, "graph": edges}
        return (
            f"{self.kind} {given}, weights {self.weights}, {self.settings()}, {self.shape!r}, "
            f"poison {self.poison}, operations {self.operations}, calls {self.calls}, "
            f"joins {self.joins}, in step {self.in_step}, starts {self.starts[:, 0].tolist()}"
        )

    # The plan

    def _draw_given(self):
        """Return the arguments of the collective, and all ranks' weights."""
        plan, size, weights = self.plan, self.size, [1.0] * self.size
        drawn = plan.random() < 0.5
        if self.kind == "neighbors":
            clock = plan.choice(("neighbors", "global"))
            graph = connected(plan, size, directed=False) if drawn else None
            return {"clock": clock, "graph": graph}, weights
        if self.kind == "queues":
            return self._draw_queues(), weights
        if self.kind == "pairs":
            graph = connected(plan, size, directed=False) if drawn else None
            return {"seed": plan.randrange(100), "graph": graph}, weights
        if self.kind == "server":
            mode = plan.choice(("bsp", "bsp", "asp", "asp", "backup", "hete"))
            backups = plan.randrange(size) if mode == "backup" else 0
            return {"mode": mode, "backups": backups, "server": plan.randrange(size)}, weights
        if plan.random() < 0.5:
            weights = [plan.choice((0.25, 1.0, 3.0)) for _ in range(size)]
        if drawn:
            return {"graph": connected(plan, size, directed=True)}, weights
        return {"neighbors": plan.randint(1, max(1, (size - 1).bit_length()))}, weights

    def _draw_queues(self):
        """Return what may go together, on a graph on which all ranks count the same."""
        plan = self.plan
        given = {"graph": plan.choice(("ring", "ring-based"))}
        given["order"] = plan.choice(("parallel", "serial"))
        if plan.random() < 0.2:
            return {**given, "mode": "notify-ack"}
        given["max_gap"] = plan.choice((None, 1, 2, 5))
        given["staleness"] = plan.choice((None, None, 0, 3))
        if given["max_gap"] and self.size > 1:
            given["backup"] = plan.choice((0, 0, 1))
        return given

    def _draw_steps(self, script):
        """Return one rank's changes: of each call, of what follows it, and whether it poisons."""
        return [
            (
                self.shape.draw_change(script),
                self.shape.draw_change(script),
                self.shape.draw_poison(script) if script.random() < self.poison else None,
            )
            for _ in range(self.epochs * self.rounds + 1)
        ]

    @property
    def conserves(self):
        """Whether each change counts, and as much as any other."""
        given = self.given
        if self.kind == "queues" and (given.get("backup") or given.get("staleness") is not None):
            return False
        return given.get("mode") not in ("backup", "hete")

    @property
    def synchronizes_changes(self):
        """Whether a change counts in `synchronize` as in a call; with push-sum, if w is 1."""
        regular = "neighbors" in self.given and set(self.weights) == {1.0}
        return self.kind != "push-sum" or regular

    @property
    def loaded(self):
        """What ranks go on from after `load`."""
        rows = 2.0 + np.array([np.full(self.shape.width, 3.0 * r) for r in range(self.size)])
        return rows[[self.given["server"]] * self.size] if self.kind == "server" else rows

    @property
    def bound(self):
        """Return what no number can exceed, but where little weight is left to a rank."""
        given = [
            np.abs(change).max() for steps in self.steps for step in steps for change in step[:2]
        ]
        return 2 + 3 * self.size + sum(given)

    def _work_out(self):
        """Return the mean of all models, by when all ranks have it."""
        weights = np.array(self.weights)[:, None]
        values, expected = self.starts * weights, {}
        for epoch, calls in enumerate(np.array(self.calls)):
            for t in range(self.rounds):
                operation = self.operations[t]
                if operation == "load":
                    values = self.loaded * weights
                if operation == "synchronize" and self.synchronizes_changes:
                    values += [steps[epoch * self.rounds + t][1] for steps in self.steps]
                if operation in ("average", "synchronize"):
                    expected[epoch, t, operation] = values.sum(0) / weights.sum()
                if operation == "synchronize":
                    values = expected[epoch, t, operation] * weights
                for rank in np.flatnonzero(calls > t):
                    change, _, poison = self.steps[rank][epoch * self.rounds + t]
                    values[rank] += 0 if poison else change
            if self.joins or self.synchronizes_changes:
                values += [steps[(epoch + 1) * self.rounds][1] for steps in self.steps]
            expected[epoch, self.rounds, "end"] = values.sum(0) / weights.sum()
            values = expected[epoch, self.rounds, "end"] * weights
        return expected if self.conserves else {}

    # What this rank does

    def play(self):
        own = {"weight": self.weights[self.rank]} if self.kind == "push-sum" else {}
        self.x = self.shape.new(self.starts[self.rank])
        with KINDS[self.kind](
            self.comm,
            self.shape.given(self.x),
            **self.settings(PeerCollective),
            **self.given,
            **own,
        ) as self.collective:
            for epoch, calls in enumerate(self.calls):
                first = self.collective.version
                for t in range(calls[self.rank]):
                    self.together(epoch, t, self.operations[t])
                    self.pause()
                    if self.in_step:
                        self.comm.Barrier()
                    self.call(epoch, t)
                    self.pause()
                self.counted = self.collective.statistics().versions
                self.finish(epoch)
                reached = self.collective.version
                self.require(reached == first + max(calls) or not self.joins, epoch, reached)

    def together(self, epoch, t, operation):
        """Do what all ranks do together before this round."""
        if operation == "load":
            self.x = self.shape.new(self.loaded[self.rank])
            if self.kind == "server" and self.rank != self.given["server"]:
                self.shape.add(self.x, np.ones(self.shape.width))
            self.collective.load(self.shape.given(self.x), 3 * t)
            self.require(self.collective.version == 3 * t, operation, self.collective.version)
        elif operation == "average":
            shown, before = copied(self.x), digest(self.x)
            self.collective.average(self.shape.given(shown))
            self.require(digest(self.x) == before, epoch, t, "average has changed the vector")
            self.check_mean(shown, epoch, t, operation)
        elif operation == "synchronize":
            self.synchronize(epoch, t, operation)

    def synchronize(self, epoch, t, operation):
        if self.synchronizes_changes:
            self.shape.add(self.x, self.steps[self.rank][epoch * self.rounds + t][1])
        shown = copied(self.x)
        if self.kind in ("neighbors", "queues", "push-sum"):
            self.collective.average(self.shape.given(shown))
        self.collective.synchronize(self.shape.given(self.x))
        if self.kind in ("neighbors", "queues", "push-sum"):
            same = digest(shown) == digest(self.x)
            self.require(same, epoch, t, operation, "is not what average() said")
        self.check_mean(self.x, epoch, t, operation)

    def call(self, epoch, t):
        change, _, poison = self.steps[self.rank][epoch * self.rounds + t]
        version = self.collective.version
        self.shape.add(self.x, change)
        self.shape.poison(self.x, poison)
        result = self.collective(self.shape.given(self.x))
        told = (result.version, result.source, result.timely, result.synchronized)
        self.require(told == (version, version, True, False), version, result)
        self.require(self.rank in result.group, result)
        self.require(self.collective.version == version + 1, result, self.collective.version)
        self.check_vector(self.x, epoch, t, "call")

    def check_vector(self, x, *when):
        self.require(is_finite(x), when, "is not finite")
        self.require(self.shape.is_even(x), when, "elements that changed alike differ")
        sizes = np.abs(self.shape.summary(x))
        # Where a rank has pushed nearly all of its weight away a change counts the more.
        bounded = self.kind != "push-sum"
        high = (sizes > self.bound * 1.001 + self.tolerance).any() and bounded
        self.require(not high, when, "is too large:", sizes, self.bound)

    def check_mean(self, x, *when):
        """Check a vector that all ranks have alike."""
        self.check_vector(x, *when)
        self.note_equal(when, x)
        if when in self.expected:
            self.require_near(self.shape.summary(x), self.expected[when], self.tolerance, *when)

    def finish(self, epoch):
        """Let all ranks have the same, at the end."""
        self.pause()
        if not self.joins:
            self.synchronize(epoch, self.rounds, "end")
            return
        self.shape.add(self.x, self.steps[self.rank][(epoch + 1) * self.rounds][1])
        self.collective.join(self.shape.given(self.x))
        self.check_mean(self.x, epoch, self.rounds, "end")

    def what_is_missing(self, counted):
        if self.in_step and self.size > 1 and self.rounds >= 8 and not counted:
            return f"no pair was averaged in {self.rounds} calls of all ranks"
        return None


def make(comm, seed, options):
    """Make a scenario of one of these collectives, or of sums over all ranks."""
    kind = Sums if random.Random(seed).random() < 0.2 else PeerProtocol
    return kind(comm, seed, options)
