"""Weights of models trained on different numbers of samples, and when they help."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

GRID = 400  # rates tried before the best of them is refined
SLOWEST, FASTEST = 1e-6, 50.0  # fitted exponents: over all the losses, and per loss
REFINEMENTS = 60  # golden-section steps on the interval of the exponent


def weights(delays: Sequence[int] | np.ndarray, r: float) -> np.ndarray:
    """Return q_i = r^{T_i} / Σ_j r^{T_j}.

    They are computed from the differences to the smallest delay, so that none underflows because
    all delays are long: the largest weight is never below 1/k.

    Args:
        delays: T_i, int array of shape (k,): number of samples by which each of k nodes is behind
            the fastest, at least 0.
        r: the contraction rate, 0 ≤ r ≤ 1. With 1 all have equal weights, with 0 only the fastest
            has weight.

    Returns:
        float64 array of shape (k,), of sum 1.

    Raises:
        ValueError: there are no delays, or one of them or r is out of range.

    Source: WP-SGD, Equation 6.
    """
    powers = _powers(delays, r)
    return powers / powers.sum()


def bound_ratio(delays: Sequence[int] | np.ndarray, r: float) -> float:
    """Return 2 Σ r^{T_i} ÷ (√k + k), which is above 1 where Corollary 4 holds; see `beats_fastest`.

    Args, Raises: those of `weights`.
    """
    powers = _powers(delays, r)
    return float(2 * powers.sum() / (math.sqrt(len(powers)) + len(powers)))


def beats_fastest(delays: Sequence[int] | np.ndarray, r: float) -> bool:
    """Return whether the bound of the weighted average is below that of the fastest node alone.

    That is 2 Σ r^{T_i} > √k + k. It compares bounds, and is not a prediction: from a start far from
    the minimum the fastest node alone is better at first in any case.

    Args, Raises: those of `weights`.

    Source: WP-SGD, Corollary 4.
    """
    return bound_ratio(delays, r) > 1


def averages_help(delays: Sequence[int] | np.ndarray, r: float) -> bool:
    """Return whether Σ r^{T_i} > √k, so that repeated averaging reduces the deviation.

    Args, Raises: those of `weights`; the delays are those of one span.

    Source: WP-SGD, section 5.1.
    """
    powers = _powers(delays, r)
    return bool(powers.sum() > math.sqrt(len(powers)))


def delay_contracts(
    learning_rate: float, regularization: float, square: float, slope: float, delay: int
) -> bool:
    """Return whether ηλ + ηβ²c* ≤ (1 − ηλ)^τ, under which delayed SGD contracts by 1 − ηλ.

    Args:
        learning_rate, regularization: η and λ.
        square: β²_max, the largest ‖x‖² of a sample.
        slope: c*, the largest |∂L/∂ŷ|: 1 for the hinge loss.
        delay: τ_max, number of updates between a model's use and the update computed from it.

    Source: WP-SGD, Lemma 4, which also needs `check` to accept all updates.
    """
    shrink = learning_rate * regularization
    return shrink + learning_rate * square * slope <= (1 - shrink) ** delay


def contraction_rate(losses: Sequence[float] | np.ndarray, every: int = 1) -> float:
    """Return the r for which floor + A·r^n fits an objective's decrease best.

    Least squares: for each r the best floor and A are a linear problem.

    Args:
        losses: float array of shape (n,), n ≥ 4: values of the objective, evenly spaced.
        every: number of samples between two of them, so that r is per sample.

    Raises:
        ValueError: there are too few, one is not finite, or they do not decrease to a floor.

    Source: WP-SGD, section 4.2 and Figure 3.
    """
    values = np.asarray(losses, dtype=np.float64)
    if values.ndim != 1 or len(values) < 4 or not np.isfinite(values).all():
        raise ValueError("losses must be 4 or more finite numbers")
    if every < 1:
        raise ValueError(f"every must be 1 or more, not {every}")
    scale = np.ptp(values)
    if scale == 0:
        raise ValueError("the losses are all equal: there is no rate to fit")
    scaled, places = (values - values[-1]) / scale, np.linspace(0, 1, len(values))
    grid = np.geomspace(SLOWEST, FASTEST * len(values), GRID)
    best = int(np.argmin([_fit(exponent, places, scaled)[0] for exponent in grid]))
    exponent = _refined(grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)], places, scaled)
    if best in (0, GRID - 1) or _fit(exponent, places, scaled)[1] <= 0:
        raise ValueError("the losses do not decrease to a floor: there is no rate to fit")
    return math.exp(-exponent / ((len(values) - 1) * every))


def _powers(delays: Sequence[int] | np.ndarray, r: float) -> np.ndarray:
    """Return r^{T_i − min T}."""
    behind = np.asarray(delays, dtype=np.float64)
    if behind.ndim != 1 or not behind.size:
        raise ValueError("delays must be a sequence of at least one number")
    if not (np.isfinite(behind) & (behind >= 0)).all():
        raise ValueError("delays must be numbers of at least 0")
    if not 0 <= r <= 1:
        raise ValueError(f"r must be from 0 to 1, not {r}")
    return np.power(float(r), behind - behind.min())


def _fit(exponent: float, places: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the squared error of the best floor + A·exp(−exponent·place), and its A."""
    curve = np.exp(-exponent * places)
    curve -= curve.mean()
    height = curve @ (values - values.mean()) / max(curve @ curve, np.finfo(float).tiny)
    rest = values - values.mean() - height * curve
    return float(rest @ rest), float(height)


def _refined(low: float, high: float, places: np.ndarray, values: np.ndarray) -> float:
    """Return the exponent of least error between two exponents."""
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(REFINEMENTS):
        step = golden * (high - low)
        if _fit(high - step, places, values)[0] < _fit(low + step, places, values)[0]:
            high = low + step
        else:
            low = high - step
    return (low + high) / 2
