"""The contraction rate r, fitted to how a short training's objective decreases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wagma.wpsgd.methods import METHODS
from wagma.wpsgd.rates import contraction_rate
from wagma.wpsgd.samples import Order
from wagma.wpsgd.training import Problem

__all__ = ["Contraction", "fit_contraction"]

POINTS = 40  # evaluations after the first one
ROWS = 1000  # training samples that the objective is evaluated on
SHORTEST = 1000  # samples: the rate of fewer is mostly noise
SHARE = 10  # the probe has at most a tenth of the run's samples


@dataclass(frozen=True)
class Contraction:
    """A fitted contraction rate, and the decrease that it was fitted to.

    Attributes:
        rate: r per sample, at most 1 − ηλ.
        every: number of samples from one value to the next.
        objectives: float64 array of shape (41,), from the start on.
    """

    rate: float
    every: int
    objectives: np.ndarray

    @property
    def samples(self) -> int:
        """Number of samples that the probe consumed."""
        return self.every * (len(self.objectives) - 1)


def fit_contraction(problem: Problem, samples: int, seed: int = 0) -> Contraction:
    """Train a model of its own by sequential SGD, and fit r to its objective's decrease.

    It consumes 1 / (ηλ) samples, in which the distance from the minimum falls to 1/e if the paper's
    bound r = 1 − ηλ is reached, but at most a tenth of the run's and at least 1,000. The objective
    is that of up to 1,000 random training samples. A fitted r above 1 − ηλ, the paper's limit, is
    replaced by it. It takes less time than a tenth of one node's run.

    Args:
        problem: the training problem, with all training samples.
        samples: number of samples that the run's fastest node will consume.
        seed: seed of the samples that are evaluated, and of the order of those that are consumed.

    Returns:
        The rate, with the objectives that it was fitted to.

    Raises:
        ValueError: the objective does not decrease to a floor, so that there is no rate to fit.

    Source: WP-SGD, sections 1 and 4.2, and Figure 3.
    """
    shrink = problem.lr * problem.l2
    longest = max(SHORTEST, samples // SHARE)
    every = math.ceil((min(max(SHORTEST, 1 / shrink), longest) if shrink else longest) / POINTS)
    generator = np.random.default_rng([seed, 0, POINTS])  # apart from the nodes' [seed, node]
    rows = generator.permutation(len(problem.train))
    evaluated = problem.train.take(np.sort(rows[:ROWS]))
    node, order = problem.steps(METHODS["sequential"]), Order(rows, [seed, 1, POINTS])
    objectives = []
    for place in range(POINTS + 1):
        if place:
            node.advance(order.take(every))
        objectives.append(evaluated.objective(node.model(), problem.l2, problem.logistic))
    rate = contraction_rate(objectives, every)
    return Contraction(min(rate, 1 - shrink), every, np.array(objectives))
