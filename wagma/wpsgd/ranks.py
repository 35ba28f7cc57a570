"""The ranks of a job as nodes, each at its own speed; importing it loads MPI."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from collectives import GroupAllreduce
from wagma.job import meet
from wagma.wpsgd.methods import Method
from wagma.wpsgd.rates import bound_ratio
from wagma.wpsgd.samples import Order
from wagma.wpsgd.training import Point, Problem, Updates, Weighing
from wagma.wpsgd.workers import Workers

LOOK = 2e-3  # seconds between looks for messages of other ranks and for signals
MOST = 4096  # samples between these
BLOCK = 1 << 16  # samples that worker threads are given at a time
SHORTEST = 1e-3  # shortest sleep of a rank, in seconds; shorter ones are added up
LONG = 0.1  # seconds of a sample, above which ranks look for signals while they wait for others
LIKELY = 1e-5  # seconds that a sample may take to compute


class Ranks:
    """This rank's node, among those of all ranks; constructing and closing it is collective.

    The first rank that has consumed its samples tells all others, which stop within about `LOOK`,
    or after a sample that takes longer to compute. A rank that is asked to stop does the same. One
    that sleeps because it is slow stops at once: its sample is consumed, and the rest of the time
    that it must take passes before the next one. If a node has several workers, they are threads.

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
        weighing: see `Team`.
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
        self.seconds, self.stopped, self.weighing = 0.0, False, None
        self._order = Order(np.arange(len(problem.train)), [seed, comm.rank])
        self._factor, self._sample_seconds, self._owed = factor, sample_seconds, 0.0
        self._chunk = 1
        longest = comm.allreduce(factor * max(sample_seconds, LIKELY), op=MPI.MAX)
        self._long = longest > LONG  # on any rank, because all wait in the same way
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
            self._consume(self.steps.consumed + 1, tells=False, asleep=self._long)
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

    def consumed(self) -> list[int]:
        consumed = self._comm.allgather(self.steps.consumed if self._trains else None)
        return [each for each in consumed if each is not None]

    def evaluate(self, samples: int) -> Point:
        began = time.perf_counter()
        model = self.model()
        seconds = self._comm.allreduce(time.perf_counter() - began, op=MPI.MAX)
        if self._alike or self.method.alone:
            seconds = 0.0
        known = self._comm.rank == 0
        objective = self.problem.objective(model) if known else float("nan")
        delays = self.delays()
        if self.weighing is None or not (self._alike or self.method.weighted):
            self._note(delays)
        ratio = bound_ratio(delays, self.problem.r)
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
        return float(self._note(self.delays()).weights[self._comm.rank])

    def _note(self, delays: np.ndarray) -> Weighing:
        """Return how models are weighted; record it, unless it is an average of equal models."""
        weighing = self.problem.weigh(self.method, delays)
        if self.weighing is None or not self._alike:
            self.weighing = weighing
        return weighing

    def _replace(self) -> None:
        self.steps.load(self.model())
        if not self.problem.total_delays:
            self._applied = self.steps.applied
        self._alike = True

    def _consume(self, samples: int, tells: bool, asleep: bool = True) -> None:
        """Consume up to so many samples in all; fewer if another rank has finished and `tells`.

        A rank that is done waits for the others, `asleep` if that may take long.
        """
        comm = self._comm
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        halted = self._rest()
        while self._trains and self.steps.consumed < samples and not halted:
            self._make(samples - self.steps.consumed)
            halted = self._rest()
        while not (self._trains or halted):  # the rank that trains tells when it is done
            time.sleep(SHORTEST)
            halted = self._halted()
        asked = self._asked()
        first = asked or (tells and self._trains and self.steps.consumed >= samples)
        sent = [comm.Isend(b"", rank) for rank in others] if first else []
        if asleep:
            arrived = comm.Ibarrier()
            while not arrived.Test():
                time.sleep(SHORTEST)
                asked = self._asked()
                if asked and not first:
                    first, sent = True, [comm.Isend(b"", rank) for rank in others]
        said = comm.allgather((first, asked))
        for rank in others:
            if said[rank][0]:
                comm.Recv(bytearray(), rank)
        MPI.Request.Waitall(sent)
        self.stopped = any(asked for _, asked in said)
        self._alike = False

    def _halted(self) -> bool:
        """Return whether another rank has finished or this one was asked to stop."""
        return self._comm.Iprobe() or self._asked()

    def _make(self, most: int) -> None:
        """Consume some samples: as many as take less than `LOOK`, or one."""
        if self._workers:
            rows = self._order.peek(min(BLOCK, most))
            self._order.take(self._workers.consume(rows, self._halted))
            return
        began, count = time.perf_counter(), min(self._chunk, most)
        self.steps.advance(self._order.take(count))
        taken = time.perf_counter() - began
        due = self._factor * max(taken, count * self._sample_seconds)
        self._owed += due - taken
        self._chunk = max(1, min(int(count * LOOK / (2 * due)), 2 * count, MOST))

    def _rest(self) -> bool:
        """Sleep for the rest of the time that samples must take; return whether to stop.

        If so it does not sleep on: the time that is left is owed until the next call.
        """
        halted = self._halted()
        if self._owed >= SHORTEST:
            began = time.perf_counter()
            end = began + self._owed
            while not halted and time.perf_counter() < end:
                time.sleep(min(LOOK, max(0.0, end - time.perf_counter())))
                halted = self._halted()
            self._owed -= time.perf_counter() - began
        return halted
