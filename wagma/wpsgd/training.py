"""One run of a method, independent of how time is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wagma.wpsgd.methods import SPAN, STEP, Method
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

    def steps(self, method: Method) -> Steps:
        """Return a node that has made none."""
        return Steps(
            self.train,
            np.full(self.train.features, self.start),
            self.lr,
            self.l2,
            logistic=self.logistic,
            workers=self.workers if method.delayed else 1,
            check=self.check and method.delayed,
        )

    def rate_of(self, method: Method) -> float:
        """Return r; 1, by which all count alike, of a method without weights."""
        if not method.weighted:
            return 1.0
        return self.r

    @property
    def r(self) -> float:
        """The contraction rate that is given, else 1 − ηλ."""
        return 1 - self.lr * self.l2 if self.rate is None else self.rate

    def objective(self, model: np.ndarray) -> float:
        """Return the objective on the test samples."""
        return self.test.objective(model, self.l2, self.logistic)


@dataclass
class Updates:
    """What has become of updates, of one node or several.

    Attributes:
        applied, abandoned: how many.
        late: how many of them were pushed when so many others had been applied since their pull:
            int64 array of shape (65,), of which the last are those of 64 and more.
        longest: the most that had.
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
        """Return a node's."""
        return cls(steps.applied, steps.abandoned, steps.delays, steps.longest)


@dataclass(frozen=True)
class Point:
    """A moment of a run.

    Attributes:
        samples: what the fastest node has consumed.
        seconds: until the average would be there, if the run ended now.
        objective: of that average, on the test samples; nan where it is not known.
        bound_ratio: of the nodes' delays then: above 1, Corollary 4 holds.
    """

    samples: int
    seconds: float
    objective: float
    bound_ratio: float


class Team(Protocol):
    """All nodes, in modelled time or on the ranks of a job, where everything is collective.

    Attributes:
        stopped: whether somebody was asked to stop.
    """

    stopped: bool

    def advance(self, samples: int) -> None:
        """Let the fastest node have consumed so many samples; the others, what their speed says."""

    def advance_together(self, samples: int) -> None:
        """Let all nodes have consumed so many samples, and average after each."""

    def average(self) -> None:
        """Let all nodes go on from their average."""

    def evaluate(self, samples: int) -> Point:
        """Return the point; no clock runs meanwhile."""

    def delays(self) -> np.ndarray:
        """Return T_i: how many updates each node that trains is behind the one that has most.

        They are counted from the last average on that all have gone on from.
        """

    def model(self) -> np.ndarray:
        """Return Σ q_i w_i of the nodes' models."""

    def updates(self) -> Updates:
        """Return what has become of the updates of all nodes."""

    def close(self) -> None:
        """Leave what the nodes average by."""


def run(method: Method, team: Team, span: int, samples: int, every: int) -> Iterator[Point]:
    """Train until the fastest node has consumed so many samples, or the team has stopped.

    Args:
        method: one of `METHODS`.
        team: all nodes.
        span: samples of the fastest node between averages, of a method that has them.
        samples: what the fastest node consumes, from 1 on.
        every: how many of them are between evaluations; there is one at the end.
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
            yield team.evaluate(done)


def following(done: int, every: int) -> int:
    """Return the next multiple."""
    return (done // every + 1) * every
