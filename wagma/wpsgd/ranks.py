"""The ranks of a job as nodes, each at its own speed; importing it loads MPI."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from collectives import GroupAllreduce
from wagma.job import meet
from wagma.wpsgd.methods import Method
from wagma.wpsgd.rates import bound_ratio, weights
from wagma.wpsgd.samples import Order
from wagma.wpsgd.training import Point, Problem, Updates
from wagma.wpsgd.workers import Workers

CHUNK = 16  # samples between checks for messages of other ranks
BLOCK = 1 << 16  # samples that worker threads are given at a time
SHORTEST = 1e-3  # shortest sleep of a rank, in seconds; shorter ones are added up


class Ranks:
    """This rank's node, among those of all ranks; constructing and closing it is collective.

    The first rank that has consumed its samples tells all others, which stop after their current
    samples. A rank that is asked to stop does the same. If a node has several workers, they are
    threads.

    No collective's thread calls MPI here, so a job may have any thread level except SINGLE.

    Args:
        method: the method; the same on all ranks.
        problem: with this rank's shard to train on, or all samples if it trains alone. Only rank 0
            evaluates.
        comm: mpi4py intracommunicator, which is duplicated.
        factor: factor by which this rank's samples take longer.
        sample_seconds: least seconds per sample, times the factor.
        seed: seed of the order.
        trains: whether this rank trains, if only one node does.
        asked_to_stop: function that returns whether to stop.

    Attributes:
        seconds: since the beginning, without evaluations.
        stopped: whether a rank was asked to stop.
        steps: this rank's node.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        comm: MPI.Intracomm,
        *,
        factor: float = 1.0,
        sample_seconds: float = 0.0,
        seed: int = 0,
        trains: bool = True,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.method, self.problem = method, problem
        self.steps = problem.steps(method)
        self.seconds, self.stopped = 0.0, False
        self._order = Order(np.arange(len(problem.train)), [seed, comm.rank])
        self._factor, self._sample_seconds, self._owed = factor, sample_seconds, 0.0
        self._trains, self._asked = trains, asked_to_stop
        self._workers = None
        if self.steps.workers > 1 and trains:
            self._workers = Workers(self.steps, factor, sample_seconds)
        self._applied = 0
        self._alike = True  # all ranks have the same model
        self._reduction = GroupAllreduce(
            comm, self.steps.model(), group_size=1, wait="group", engine="none"
        )
        self._comm = comm.Dup()
        meet(self._comm)

    def advance(self, samples: int) -> None:
        began = time.perf_counter()
        self._consume(samples, tells=not self.method.waits)
        self.seconds += self._comm.allreduce(time.perf_counter() - began, op=MPI.MAX)

    def advance_together(self, samples: int) -> None:
        began = time.perf_counter()
        while self.steps.consumed < samples and not self.stopped:
            self._consume(self.steps.consumed + 1, tells=False, asleep=False)
            if not self.stopped:
                self._replace()
        self.seconds += self._comm.allreduce(time.perf_counter() - began, op=MPI.MAX)

    def average(self) -> None:
        began = time.perf_counter()
        self._replace()
        self.seconds += self._comm.allreduce(time.perf_counter() - began, op=MPI.MAX)

    def delays(self) -> np.ndarray:
        mine = self.steps.applied - self._applied if self._trains else -1
        applied = np.array(self._comm.allgather(mine))
        return applied.max() - applied[applied >= 0]

    def model(self) -> np.ndarray:
        model = self.steps.model()
        self._reduction.average(model, weight=self._weight())
        return model

    def evaluate(self, samples: int) -> Point:
        began = time.perf_counter()
        model = self.model()
        seconds = self._comm.allreduce(time.perf_counter() - began, op=MPI.MAX)
        if self._alike or self.method.alone:
            seconds = 0.0
        known = self._comm.rank == 0
        objective = self.problem.objective(model) if known else float("nan")
        ratio = bound_ratio(self.delays(), self.problem.r)
        meet(self._comm)  # before the clock continues
        return Point(samples, self.seconds + seconds, objective, ratio)

    def updates(self) -> Updates:
        return sum(self._comm.allgather(Updates.of(self.steps)), Updates())

    def close(self) -> None:
        if self._workers:
            self._workers.close()
        self._reduction.close()
        self._comm.Free()

    def _weight(self) -> float:
        """Return this rank's share of an average; ranks that do not train have none."""
        if self.method.alone:
            return float(self._trains)
        if not self.method.weighted:
            return 1 / self._comm.size
        return float(weights(self.delays(), self.problem.rate_of(self.method))[self._comm.rank])

    def _replace(self) -> None:
        self.steps.load(self.model())
        self._applied, self._alike = self.steps.applied, True

    def _consume(self, samples: int, tells: bool, asleep: bool = True) -> None:
        """Consume up to so many samples in all; fewer if another rank has finished and `tells`.

        A rank that is done waits for the others, `asleep` if that may take long.
        """
        comm = self._comm
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        told = asked = False
        while self._trains and self.steps.consumed < samples and not (told or asked):
            self._make(samples - self.steps.consumed)
            told, asked = comm.Iprobe(), self._asked()
        while not (self._trains or told or asked):  # the rank that trains tells when it is done
            time.sleep(SHORTEST)
            told, asked = comm.Iprobe(), self._asked()
        first = asked or (tells and self._trains and self.steps.consumed >= samples)
        sent = [comm.Isend(b"", rank) for rank in others] if first else []
        if asleep:
            meet(comm)
        said = comm.allgather((first, asked))
        for rank in others:
            if said[rank][0]:
                comm.Recv(bytearray(), rank)
        MPI.Request.Waitall(sent)
        self.stopped = any(asked for _, asked in said)
        self._alike = False

    def _make(self, most: int) -> None:
        """Consume some samples, and sleep for the rest of the time that they must take."""
        if self._workers:
            rows = self._order.peek(min(BLOCK, most))
            stop = lambda: self._comm.Iprobe() or self._asked()  # noqa: E731
            self._order.take(self._workers.consume(rows, stop))
            return
        began, count = time.perf_counter(), min(CHUNK, most)
        self.steps.advance(self._order.take(count))
        taken = time.perf_counter() - began
        self._owed += self._factor * max(taken, count * self._sample_seconds) - taken
        if self._owed >= SHORTEST:
            began = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - began
