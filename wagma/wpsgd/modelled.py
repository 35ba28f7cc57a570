"""Nodes in modelled time, in one process: samples × slow factor, and the machine's allreduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from wagma.simulation.core import allreduce_time
from wagma.simulation.machine import Machine
from wagma.wpsgd.methods import STEP, Method
from wagma.wpsgd.rates import bound_ratio
from wagma.wpsgd.samples import Order, shards
from wagma.wpsgd.training import Point, Problem, Updates, Weighing

SAMPLE_SECONDS = 10e-6


class Modelled:
    """All nodes of a run.

    Each node has a shard of the samples; neither the shard nor the order of its samples depends on
    the method. A node that trains alone has all samples.

    Args:
        method, problem: the method and the training problem.
        speeds: of the nodes; only their ratios determine which nodes are behind.
        machine: the network between the nodes.
        sample_seconds: seconds per sample of a node of speed 1.
        seed: seed of the shards and orders.
        asked_to_stop: function that returns whether to stop.
        links: of the nodes: the share of the machine's bandwidth that each has; by default 1.

    Attributes:
        seconds: the modelled time.
        nodes: the `Steps` of each node; one for all nodes if they average after every step.
        stopped: whether the process was asked to stop.
        weighing: see `Team`.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        speeds: Sequence[float],
        machine: Machine,
        sample_seconds: float = SAMPLE_SECONDS,
        seed: int = 0,
        asked_to_stop: Callable[[], bool] = lambda: False,
        links: Sequence[float] = (1.0,),
    ) -> None:
        self._asked, self.weighing = asked_to_stop, None
        self.method, self.problem, self.seconds = method, problem, 0.0
        speeds = np.asarray([max(speeds)] if method.alone else speeds, np.float64)
        parts = shards(len(problem.train), len(speeds), np.random.default_rng([seed]))
        orders = [Order(rows, [seed, node]) for node, rows in enumerate(parts)]
        self._orders, self._shares = orders, speeds / speeds.max()
        if method.waits:
            self._shares = np.ones(len(speeds))
        self._sample_seconds = sample_seconds / (speeds.min() if method.waits else speeds.max())
        together = method.averages == STEP
        self.nodes = [problem.steps(method) for _ in range(1 if together else len(orders))]
        ranks, nbytes = len(orders), 8 * problem.train.features
        # All members of an allreduce send equally many bytes, and wait for the slowest link.
        slowest = replace(
            machine,
            byte_gap=machine.byte_gap / min(links),
            injection=machine.injection * min(links),
        )
        self._average_seconds = allreduce_time(slowest.for_job(ranks), ranks, nbytes)
        self._applied = np.zeros(len(self.nodes), np.int64)
        self._alike = True  # all nodes have the same model

    @property
    def stopped(self) -> bool:
        return self._asked()

    def delays(self) -> np.ndarray:
        applied = np.array([node.applied for node in self.nodes]) - self._applied
        return self._of_each(applied.max() - applied)

    def advance(self, samples: int) -> None:
        before = max(node.consumed for node in self.nodes)
        for node, order, share in zip(self.nodes, self._orders, self._shares):
            node.advance(order.take(int(samples * share + 1e-9) - node.consumed))
        self.seconds += (samples - before) * self._sample_seconds
        self._alike = len(self.nodes) == 1

    def advance_together(self, samples: int) -> None:
        count = samples - self.nodes[0].consumed
        rows = np.stack([order.take(count) for order in self._orders], axis=1)
        self.nodes[0].advance_together(rows)
        self.seconds += count * (self._sample_seconds + self._average_seconds)

    def average(self) -> None:
        model = self.model()
        for node in self.nodes:
            node.load(model)
        if not self.problem.total_delays:
            self._applied = np.array([node.applied for node in self.nodes])
        self.seconds += self._average_seconds
        self._alike = True

    def model(self) -> np.ndarray:
        weighing = self._weigh()
        if len(self.nodes) == 1:
            return self.nodes[0].model()
        total = np.zeros(self.problem.train.features)
        for q, node in zip(weighing.weights, self.nodes):
            if q:
                total += q * node.model()
        return total

    def _weigh(self) -> Weighing:
        weighing = self.problem.weigh(self.method, self.delays())
        if self.weighing is None or not self._alike:
            self.weighing = weighing
        return weighing

    def updates(self) -> Updates:
        return sum(map(Updates.of, self.nodes), Updates())

    def consumed(self) -> list[int]:
        return self._of_each(np.array([node.consumed for node in self.nodes])).tolist()

    def _of_each(self, values: np.ndarray) -> np.ndarray:
        """Return a value for each node, also if all have the same model."""
        return np.repeat(values, len(self._orders) // len(self.nodes))

    def evaluate(self, samples: int) -> Point:
        seconds = self.seconds + (0 if self._alike else self._average_seconds)
        ratio = bound_ratio(self.delays(), self.problem.r)
        return Point(samples, seconds, self.problem.objective(self.model()), ratio)

    def close(self) -> None:
        pass
