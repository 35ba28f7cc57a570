"""One run of a method, independent of how time is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wagma.wpsgd.methods import SPAN, STEP, Method
from wagma.wpsgd.rates import weights
from wagma.wpsgd.samples import Samples
from wagma.wpsgd.steps import LATEST, Steps


@dataclass(frozen=True)
class Problem:
    """The training problem.

    Attributes:
        train, test: samples of the same features; if ranks are nodes, a rank's own shard.
        start: initial value of all parameters.
        lr, l2: η and λ.
        rate: r of the weights; None: 1 − ηλ.
        span: samples of the fastest node between averages.
        workers: number of workers per node of a delayed method.
        check: whether these abandon updates that `wagma.wpsgd.check` rejects.
        logistic: as for `Steps`.
        total_delays: whether T_i counts all of a node's updates, and not only those since the last
            average that all nodes have continued from.
    """

    train: Samples
    test: Samples
    start: float
    lr: float
    l2: float
    rate: float | None = None
    span: int = 1000
    workers: int = 2
    check: bool = False
    logistic: bool = False
    total_delays: bool = False

    def steps(self, method: Method) -> Steps:
        """Return a node that has made no steps."""
        return Steps(
            self.train,
            np.full(self.train.features, self.start),
            self.lr,
            self.l2,
            logistic=self.logistic,
            workers=self.workers if method.delayed else 1,
            check=self.check and method.delayed,
        )

    def weigh(self, method: Method, delays: np.ndarray) -> Weighing:
        """Return how nodes with these T are weighted: equally if the method has no weights."""
        return Weighing(delays, weights(delays, self.r if method.weighted else 1.0))

    @property
    def r(self) -> float:
        """The contraction rate: as given, or else 1 − ηλ."""
        return 1 - self.lr * self.l2 if self.rate is None else self.rate

    def objective(self, model: np.ndarray) -> float:
        """Return the objective on the test samples."""
        return self.test.objective(model, self.l2, self.logistic)


@dataclass
class Updates:
    """Counts of the updates of one node or several.

    Attributes:
        applied, abandoned: number of updates that were applied, and that were abandoned.
        late: number of updates by their delay, the number of others applied between pull and push:
            int64 array of shape (65,); the last entry counts delays of 64 and more.
        longest: the longest delay.
    """

    applied: int = 0
    abandoned: int = 0
    late: np.ndarray = field(default_factory=lambda: np.zeros(LATEST + 1, np.int64))
    longest: int = 0

    def __add__(self, other: Updates) -> Updates:
        return Updates(
            self.applied + other.applied,
            self.abandoned + other.abandoned,
            self.late + other.late,
            max(self.longest, other.longest),
        )

    @classmethod
    def of(cls, steps: Steps) -> Updates:
        """Return a node's counts."""
        return cls(steps.applied, steps.abandoned, steps.delays, steps.longest)


@dataclass(frozen=True)
class Point:
    """A moment of a run.

    Attributes:
        samples: number of samples that the fastest node has consumed.
        seconds: time at which the average would be complete if the run ended now.
        objective: the average's objective on the test samples; nan if it is not known.
        bound_ratio: see `rates.bound_ratio`, of the nodes' delays: above 1, Corollary 4 holds.
    """

    samples: int
    seconds: float
    objective: float
    bound_ratio: float


@dataclass(frozen=True)
class Weighing:
    """What the nodes' models were weighted by in an average.

    Attributes:
        delays: T_i of each node that trains: int64 array of shape (k,).
        weights: q_i: float64 array of shape (k,), of sum 1.
    """

    delays: np.ndarray
    weights: np.ndarray


class Team(Protocol):
    """All nodes, in modelled time or on the ranks of a job, where all methods are collective.

    Attributes:
        stopped: whether any process was asked to stop.
        weighing: that of the last average of models that differed; None if there was none yet.
    """

    stopped: bool
    weighing: Weighing | None

    def advance(self, samples: int) -> None:
        """Train until the fastest node has consumed so many samples; others at their speed."""

    def advance_together(self, samples: int) -> None:
        """Train until all nodes have consumed so many samples, averaging after each."""

    def average(self) -> None:
        """Let all nodes continue from their average."""

    def evaluate(self, samples: int) -> Point:
        """Return the current point; the clock is stopped meanwhile."""

    def delays(self) -> np.ndarray:
        """Return T_i: number of updates by which each node that trains is behind the fastest.

        They are counted from the last average that all nodes have continued from, or from the
        beginning, if the problem says so.
        """

    def model(self) -> np.ndarray:
        """Return Σ q_i w_i of the nodes' models."""

    def updates(self) -> Updates:
        """Return the counts of the updates of all nodes."""

    def consumed(self) -> list[int]:
        """Return the number of samples that each node has consumed."""

    def close(self) -> None:
        """Release the resources by which the nodes average."""


def run(method: Method, team: Team, span: int, samples: int, every: int) -> Iterator[Point]:
    """Train until the fastest node has consumed so many samples, or the team has stopped.

    Args:
        method: one of `METHODS`.
        team: all nodes.
        span: samples of the fastest node between averages, for a method that has them.
        samples: number of samples that the fastest node consumes, at least 1.
        every: number of these between evaluations; there is one at the end as well.
    """
    done = 0
    while done < samples and not team.stopped:
        ends = [samples, following(done, every)]
        if method.averages == SPAN:
            ends.append(following(done, span))
        done = min(ends)
        if method.averages == STEP:
            team.advance_together(done)
        else:
            team.advance(done)
        if method.averages == SPAN and done % span == 0 and not team.stopped:
            team.average()
        if done % every == 0 or done == samples or team.stopped:
            yield team.evaluate(max(team.consumed()) if team.stopped else done)


def following(done: int, every: int) -> int:
    """Return the next multiple of `every` after `done`."""
    return (done // every + 1) * every
