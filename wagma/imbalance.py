"""Injected stragglers: which ranks are slow at a step, and by how much.

Every rank computes the same draw from the job's seed, without communication.
"""

from __future__ import annotations

import numpy as np

KINDS = {
    "none": "no rank is delayed",
    "cloud": "two ranks, drawn anew at every step, take 320 ms longer",
    "random": "each rank takes six times as long with probability 1/ranks, drawn at every step",
}
CLOUD_DELAY = 0.320
CLOUD_RANKS = 2
CLOUD_STREAM = 3
RANDOM_FACTOR = 6.0
RANDOM_STREAM = 4


def cloud_ranks(seed: int, step: int, size: int) -> tuple[int, ...]:
    """Return the ranks that are slow at a step: two of the job, or all if it has fewer.

    "We randomly select two processes at every training step to inject a certain amount of delay
    (320 ms)": the WAGMA-SGD paper, section V-B.
    """
    generator = np.random.default_rng([seed, CLOUD_STREAM, step])
    chosen = generator.choice(size, min(CLOUD_RANKS, size), replace=False)
    return tuple(sorted(int(rank) for rank in chosen))


def random_ranks(seed: int, step: int, size: int) -> np.ndarray:
    """Return the ranks that are slow at a step: each with probability 1/size.

    "Randomly slowing down every worker by 6 times at a probability of 1/n in each iteration": the
    Hop paper, section 7.3.1.
    """
    generator = np.random.default_rng([seed, RANDOM_STREAM, step])
    return np.flatnonzero(generator.random(size) < 1 / size)


def delays(kind: str, seed: int, step: int, compute: np.ndarray) -> np.ndarray:
    """Return the seconds by which an imbalance of `KINDS` delays each rank's step, at scale 1.

    Args:
        kind: one of `KINDS`.
        compute: float64 array of shape (ranks,): seconds of the steps without delays.
    """
    size = len(compute)
    delays = np.zeros(size)
    if kind == "cloud":
        delays[list(cloud_ranks(seed, step, size))] = CLOUD_DELAY
    elif kind == "random":
        slow = random_ranks(seed, step, size)
        delays[slow] = slow_rank_delay(RANDOM_FACTOR, compute[slow])
    return delays


def delay(kind: str, seed: int, step: int, rank: int, size: int, compute: float) -> float:
    """Return the seconds by which an imbalance delays one rank's step of ``compute`` seconds."""
    return float(delays(kind, seed, step, np.full(size, compute))[rank])


def slow_rank_delay(factor: float, compute: float | np.ndarray) -> float | np.ndarray:
    """Return the delay that makes a step of ``compute`` seconds take ``factor`` times as long.

    The Hop paper, section 7.3.5, has one worker slow by a factor of 4. The Ripples paper, section
    7.4, adds "2 or 5 times the normal iteration time of sleep every iteration on one specific
    worker": factors of 3 and 6.
    """
    return (factor - 1.0) * compute
