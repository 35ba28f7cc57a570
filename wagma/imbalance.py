"""Injected stragglers: which ranks are slow at a step, and by how much.

Every rank works out the same draw from the job's seed, without a message.
"""

from __future__ import annotations

import numpy as np

CLOUD_DELAY = 0.320
CLOUD_RANKS = 2
CLOUD_STREAM = 3


def cloud_ranks(seed: int, step: int, size: int) -> tuple[int, ...]:
    """Return the ranks that are slow at a step: two of the job, or all where it has fewer.

    "We randomly select two processes at every training step to inject a certain amount of delay
    (320 ms)": the WAGMA-SGD paper, section V-B.
    """
    generator = np.random.default_rng([seed, CLOUD_STREAM, step])
    chosen = generator.choice(size, min(CLOUD_RANKS, size), replace=False)
    return tuple(sorted(int(rank) for rank in chosen))


def delay(kind: str, seed: int, step: int, rank: int, size: int) -> float:
    """Return the seconds by which ``kind``, "none" or "cloud", delays a rank's step at scale 1."""
    if kind == "cloud" and rank in cloud_ranks(seed, step, size):
        return CLOUD_DELAY
    return 0.0


def slow_rank_delay(factor: float, compute: float) -> float:
    """Return the seconds that make a step of ``compute`` seconds take ``factor`` times as long."""
    return (factor - 1.0) * compute
