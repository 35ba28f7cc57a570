"""The acceptance check of delayed updates on whole vectors; `Steps` has it for rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["check"]


def check(
    iterates: Sequence[np.ndarray],
    x: np.ndarray,
    slope: float,
    delay: int,
    learning_rate: float,
    regularization: float,
) -> bool:
    """Return whether delayed SGD may apply this update.

    For each of the iterates w_{j−1−τ} … w_j that has two predecessors, with ι = x·w and w⊥ = w −
    (ι/‖x‖²)·x: ι_k lies between ι_min = (ι_{k−1} − rate·ι_{k−2}) / (1 − rate) and ι_{k−1}, and
    ‖w_{k−2}⊥‖ ≥ ‖w_{k−1}⊥‖, with rate = (λη + |L'|·η·‖x‖²)^{1/τ}. A rate of 1 or more rejects; a
    delay of 0 accepts.

    The printed algorithm rejects a quotient above 1, and has ι/√β in place of ι/β²: both contradict
    the proof of its Lemma 4.

    Args:
        iterates: the last ones, up to w_j of the last update: float64 arrays of shape (features,);
            all from w_0 on, or τ + 4 of them.
        x: the update's sample, float64 array of shape (features,).
        slope: L' of the sample at w_{j−1−τ}, where it was pulled.
        delay: τ.
        learning_rate, regularization: η and λ.

    Source: WP-SGD, Algorithm 4.
    """
    if delay == 0:
        return True
    square = float(x @ x)
    total = regularization * learning_rate + abs(slope) * learning_rate * square
    rate = total ** (1 / delay)
    if rate >= 1:
        return False
    along = [float(x @ w) for w in iterates]
    apart = [w - (iota / square if square else 0) * x for w, iota in zip(iterates, along)]
    norms = [float(np.linalg.norm(w)) for w in apart]
    last = len(iterates) - 1
    for k in range(max(2, last - 1 - delay), last + 1):
        least = (along[k - 1] - rate * along[k - 2]) / (1 - rate)
        low, high = sorted((least, along[k - 1]))
        if not (low <= along[k] <= high and norms[k - 2] >= norms[k - 1]):
            return False
    return True
