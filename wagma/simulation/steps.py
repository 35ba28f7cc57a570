"""How long the ranks' steps take: constant, drawn from a distribution, or recorded.

All return float64 arrays of shape (steps, ranks), in seconds, and the same for the same seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wagma import imbalance

__all__ = ["constant", "delayed", "log_normal", "long_tailed", "recorded"]

# Habitat's episodes, as WAGMA-SGD's section V-D has them: 5,000 steps of 1.7 s to 43.5 s, "with a
# median below 2 seconds". The median is our choice; what exceeds the shortest is log-normal, so
# that the longest is the one in 5,000, and nothing is longer.
SHORTEST, MEDIAN, LONGEST = 1.7, 1.9, 43.5
LONGEST_QUANTILE = 3.54  # of the normal distribution, at 1 − 1/5000


def constant(steps: int, ranks: int, seconds: float) -> np.ndarray:
    """Return steps that all take as long."""
    return np.full((steps, ranks), float(seconds))


def log_normal(steps: int, ranks: int, median: float, sigma: float, seed: int) -> np.ndarray:
    """Return independent steps whose logarithms are normal, of deviation ``sigma``."""
    return median * np.exp(sigma * np.random.default_rng(seed).standard_normal((steps, ranks)))


def long_tailed(steps: int, ranks: int, seed: int, median: float = MEDIAN) -> np.ndarray:
    """Return independent steps like those of reinforcement learning in Habitat.

    Args:
        median: of the steps, in seconds, above 1.7: the only thing about them that is chosen.

    Source: WAGMA-SGD, section V-D and Figure 9 (see the constants above).
    """
    sigma = math.log((LONGEST - SHORTEST) / (median - SHORTEST)) / LONGEST_QUANTILE
    tail = log_normal(steps, ranks, median - SHORTEST, sigma, seed)
    return np.minimum(SHORTEST + tail, LONGEST)


def recorded(path: Path, steps: int, ranks: int, seed: int) -> np.ndarray:
    """Return the steps of a recorded trace.

    Args:
        path: the directory of a run of ``wagma train``, of which each rank's compute and delay
            count; or a text file with one step a line and one column a rank, in seconds.
        seed: where there are more ranks than the trace has, or steps, each rank goes through one
            of its columns from a random step on, and again from its beginning.

    Raises:
        ValueError: it is neither.
        OSError: it cannot be read.
    """
    trace = _metrics(path) if path.is_dir() else _table(path)
    length, width = trace.shape
    if steps <= length and ranks <= width:
        return np.ascontiguousarray(trace[:steps, :ranks])
    begins = np.random.default_rng(seed).integers(length, size=ranks)
    begins[:width] = 0
    return trace[(begins + np.arange(steps)[:, None]) % length, np.arange(ranks) % width]


def _metrics(run: Path) -> np.ndarray:
    """Return the seconds of a run's metrics, up to its shortest rank's last step."""
    columns = []
    for file in sorted(run.glob("rank-*.jsonl")):
        records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        columns.append([record["compute_s"] + record["delay_s"] for record in records])
    length = min(map(len, columns), default=0)
    if not length:
        raise ValueError(f"{run} has no rank-*.jsonl with steps: is it a run of wagma train?")
    return np.array([column[:length] for column in columns]).T


def _table(path: Path) -> np.ndarray:
    text = path.read_text(encoding="utf-8")
    try:
        rows = text.splitlines() or ["none"]
        trace = np.loadtxt(rows, ndmin=2, delimiter="," if "," in text else None)
    except ValueError as error:
        raise ValueError(f"{path} is no table of seconds: {error}") from error
    if not np.all(np.isfinite(trace) & (trace >= 0)):
        raise ValueError(f"{path} must hold seconds, 0 or more")
    return trace


def delayed(
    steps: np.ndarray,
    kind: str,
    seed: int,
    scale: float = 1.0,
    slow_ranks: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Return steps with a paper's injected delays, drawn as ``wagma train`` draws them.

    Args:
        steps: seconds without, of shape (steps, ranks).
        kind: one of `imbalance.KINDS`.
        scale: what its delays are multiplied by.
        slow_ranks: by which factor the steps of which ranks take longer, besides.
    """
    made = steps.copy()
    for rank, factor in (slow_ranks or {}).items():
        made[:, rank] += imbalance.slow_rank_delay(factor, steps[:, rank])
    if kind != "none":
        for step, compute in enumerate(steps):
            made[step] += scale * imbalance.delays(kind, seed, step, compute)
    return made
