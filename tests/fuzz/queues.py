"""Hop: `QueuedNeighborAverage` in all its settings, and the queue of updates by itself.

What must hold: the gaps between ranks' iterations are those of Hop's Table 1 and its tokens' bound.
With backup workers each average is replayed from the vectors that it names, with staleness no
number is outside those that there have been. The queue gives what a list would.
"""

from __future__ import annotations

import random
import threading
from typing import NamedTuple

import networkx
import numpy as np

from collectives import QueuedNeighborAverage, UpdateQueue, graphs
from collectives.peers import PeerCollective

from .counters import Counters
from .peers import connected
from .scenario import Scenario
from .vectors import Shape


class Averaged(NamedTuple):
    """One call: its iteration, whose vectors were averaged, and what came out of it."""

    iteration: int
    group: tuple[int, ...]
    after: np.ndarray


class Queues(Scenario):
    """One such collective; each rank makes as many iterations as the others."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan, size = self.plan, self.size
        self.shape = Shape(plan, size, exact=plan.random() < 0.5)
        self.given = self._draw_given()
        self.starts = np.array([np.full(self.shape.width, float(r)) for r in range(size)])
        # Iterations that are skipped have changes that nobody makes.
        self.steps = [
            [self.shape.draw_change(script) for _ in range(self.rounds)] for script in self.scripts
        ]
        self.bound = np.abs(self.steps).max(initial=0) * (self.rounds + 1) * size + size
        self.tolerance = 16 * (self.rounds + 2) * self.shape.rounding * self.bound

    def __str__(self):
        graph = self.given["graph"]
        edges = graph if isinstance(graph, str) else sorted(graph.edges)
        return f"queues {self.given | {'graph': edges}}, {self.settings()}, {self.shape!r}"

    def _draw_given(self):
        plan, size = self.plan, self.size
        named = ["ring", "ring-based", "ring-based"] + ["double-ring"] * (size % 2 == 0)
        drawn = plan.random() < 0.3
        graph = connected(plan, size, plan.random() < 0.5) if drawn else plan.choice(named)
        given = {"graph": graph, "order": plan.choice(("parallel", "parallel", "serial"))}
        if plan.random() < 0.15:
            return {**given, "mode": "notify-ack"}
        given["staleness"] = plan.choice((None, None, 0, 1, 4))
        given["mean"] = plan.choice(("weighted", "weighted", "simple"))
        given["max_gap"] = plan.choice(("auto", None, 1, 2, 5, 8))
        most = [len(graphs.sources(self.edges(graph), rank)) for rank in range(size)]
        if given["max_gap"] and min(most):
            each = [plan.randint(0, count) for count in most]
            given["backup"] = plan.choice((0, 0, 1, plan.randint(0, min(most)), each))
            given["max_skip"] = plan.choice((0, 0, 0, 2, 10))
        return given

    def edges(self, graph):
        return graphs.edges_of(graph, self.size)

    def largest_gaps(self):
        """Return by how many iterations a rank may be ahead of each: array (ahead, behind)."""
        given = self.given
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(self.size))
        graph.add_edges_from(self.edges(given["graph"]))
        paths = np.array(networkx.floyd_warshall_numpy(graph, nodelist=range(self.size)))
        limits = []
        if given.get("mode") == "notify-ack":
            limits += [paths.T, 2 * paths]
        elif not np.any(given.get("backup", 0)):
            # No rank is in an iteration whose updates it has not got, by way of any path.
            limits.append(paths.T * (1 + (given["staleness"] or 0)))
        if given.get("max_gap") and given.get("mode") != "notify-ack":
            gap = given["max_gap"]
            limits.append(paths * (max(5, (given["staleness"] or 0) + 2) if gap == "auto" else gap))
        # A call that skips enters its last iteration while it is noted in its first.
        skipped = max(0, given.get("max_skip", 0) - 1)
        return np.min(limits, axis=0) + skipped if limits else np.full_like(paths, np.inf)

    def play(self):
        self.x, noted = self.shape.new(self.starts[self.rank]), []
        gaps = self.largest_gaps()[self.rank]
        with (
            Counters(self.comm) as begun,
            QueuedNeighborAverage(
                self.comm,
                self.shape.given(self.x),
                **self.settings(PeerCollective),
                **self.given,
            ) as average,
        ):
            while average.version < self.rounds:
                k = average.version
                self.pause()
                begun.set(k)
                self.shape.add(self.x, self.steps[self.rank][k])
                result = average(self.shape.given(self.x))
                there = begun.read()
                far = np.flatnonzero(k - there > gaps)
                self.require(not len(far), "in iteration", k, "ranks", far, "are at", there, gaps)
                self.require(self.rank in result.group, k, result)
                self.require(average.version > k, k, average.version)
                self.check_vector(k)
                after = self.shape.summary(self.x).astype(float)
                noted.append(Averaged(k, result.group, after))
            begun.set(self.rounds)
            self.pause()
            average.join(self.shape.given(self.x))
            self.note_equal("end", self.x)
            self.check_vector("end")
        if not self.given.get("max_skip") and self.given.get("staleness") is None:
            self.replay(self.comm.allgather(noted))

    def check_vector(self, *when):
        self.require(self.shape.is_even(self.x), when, "elements that changed alike differ")
        sizes = np.abs(self.shape.summary(self.x).astype(float))
        high = ~(sizes <= self.bound * 1.001)
        self.require(not high.any(), when, "is too large:", sizes, self.bound)

    def replay(self, noted):
        """Work out every rank's vector of every iteration from those before it."""
        before = self.starts
        serial = self.given["order"] == "serial"
        omitted = np.broadcast_to(self.given.get("backup", 0), self.size)
        for k in range(self.rounds):
            changes = np.array([steps[k] for steps in self.steps])
            sent = before + changes if serial else before
            now = np.array([own[k].after for own in noted])
            for rank, own in enumerate(noted):
                group = list(own[k].group)
                mean = sent[group].mean(0) + (0 if serial else changes[rank])
                self.require_near(now[rank], mean, self.tolerance, "iteration", k, "rank", rank)
                required = 1 + len(graphs.sources(self.edges(self.given["graph"]), rank))
                few = len(group) < required - omitted[rank]
                self.require(not few, "iteration", k, "rank", rank, "averaged only", group)
            before = now


class UpdateQueues(Scenario):
    """The queue by itself: by one thread as a list would be used, and by several."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        self.gap = self.plan.choice((None, 1, 2, 5))

    def __str__(self):
        return f"update queue, max_gap {self.gap}"

    def play(self):
        self.play_alone()
        self.play_together()

    def play_alone(self):
        """Compare it with a list."""
        queue, entries, chance = UpdateQueue(self.gap), [], self.chance
        for number in range(200):
            iteration, sender = chance.randrange(8), chance.choice((None, 0, 1))
            if chance.random() < 0.6:
                queue.enqueue(number, iteration, sender)
                entries.append((number, iteration, sender))
                continue
            iteration = chance.choice((None, iteration))
            if self.gap and iteration is not None:
                older = [
                    e
                    for e in entries
                    if (iteration - e[1]) % (self.gap + 1) == 0 and e[1] < iteration
                ]
                entries = [e for e in entries if e not in older]
            fitting = [e for e in entries if iteration in (None, e[1]) and sender in (None, e[2])]
            self.require(queue.size(iteration, sender) == len(fitting), number, fitting)
            taken = queue.dequeue(chance.randint(0, len(fitting)), iteration, sender, timeout=0)
            self.require([tuple(e) for e in taken] == fitting[: len(taken)], number, taken)
            entries = [e for e in entries if e not in fitting[: len(taken)]]
        self.require(queue.size() == len(entries), "at the end", queue.size(), len(entries))

    def play_together(self):
        """Let some threads put in what others take out: each update comes out once."""
        queue, taken = UpdateQueue(self.gap), []

        def put_in(sender):
            for iteration in range(50):
                queue.enqueue((sender, iteration), iteration, sender)

        def take_out(iterations):
            for iteration in iterations:
                taken.extend(u.update for u in queue.dequeue(3, iteration, timeout=20))

        # With rotating queues an iteration discards what is older: one receiver, in order.
        shares = [range(50)] if self.gap else [range(0, 50, 2), range(1, 50, 2)]
        threads = [threading.Thread(target=put_in, args=(sender,)) for sender in range(3)]
        threads += [threading.Thread(target=take_out, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [(sender, iteration) for sender in range(3) for iteration in range(50)]
        self.require(sorted(taken) == expected, len(taken), "updates came out")


def make(comm, seed, options):
    """Make a scenario of the collective, or of its queue."""
    kind = UpdateQueues if random.Random(f"{seed} queue").random() < 0.15 else Queues
    return kind(comm, seed, options)
