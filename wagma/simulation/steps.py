"""Times of the ranks' steps: constant, drawn from a distribution, or recorded.

All functions return float64 arrays of shape (steps, ranks), in seconds, the same for the same seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wagma import imbalance
from wagma.runs import metrics_files

__all__ = ["check", "constant", "delayed", "log_normal", "long_tailed", "read_trace", "recorded"]

# Habitat's episodes, as described in WAGMA-SGD's section V-D: 5,000 steps of 1.7 s to 43.5 s, "with
# a median below 2 seconds". The median is our choice; the excess over the shortest is log-normal,
# such that one in 5,000 reaches the longest, and is cut off there.
SHORTEST, MEDIAN, LONGEST = 1.7, 1.9, 43.5
LONGEST_QUANTILE = 3.54  # of the normal distribution, at 1 − 1/5000


def begun_within(
    limit: float | None, step_times: np.ndarray, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many parts of each step begin within a limit, and how long the steps then take.

    Args:
        limit: in seconds from a step's beginning; None: all of them begin.
        step_times: seconds of whole steps, a float64 array of shape (steps, ranks).
        parts: number of equally long parts of a step.

    Returns:
        int64 and float64 arrays of the same shape. At least one part begins.
    """
    if limit is None:
        return np.full(step_times.shape, parts), step_times
    with np.errstate(divide="ignore"):  # a step that takes no time
        begun = np.ceil(limit * parts / step_times).clip(1, parts).astype(np.int64)
    return begun, np.where(begun < parts, step_times * begun / parts, step_times)


def check(step_times: np.ndarray) -> None:
    """Check that steps of simulated ranks can take these times.

    Args:
        step_times: seconds, a float64 array of shape (steps, ranks).

    Raises:
        ValueError: it has another shape, or they are not finite, negative, or all 0.
    """
    if step_times.ndim != 2 or not step_times.size:
        raise ValueError(f"step_times must be of shape (steps, ranks), not {step_times.shape}")
    if not np.all(np.isfinite(step_times) & (step_times >= 0)) or not step_times.any():
        raise ValueError("step_times must be finite, 0 or more, and not all of them 0")


def constant(steps: int, ranks: int, seconds: float) -> np.ndarray:
    """Return steps that all take equally long: float64 array of shape (steps, ranks), in seconds.

    Args:
        steps, ranks: the number of steps of each rank, and of ranks.
        seconds: seconds that a step takes.
    """
    return np.full((steps, ranks), float(seconds))


def log_normal(steps: int, ranks: int, median: float, sigma: float, seed: int) -> np.ndarray:
    """Return independent steps whose logarithms are normally distributed.

    Args:
        steps, ranks: the number of steps of each rank, and of ranks.
        median: of the steps, in seconds.
        sigma: standard deviation of the logarithms.
        seed: the same seed gives the same steps.

    Returns:
        float64 array of shape (steps, ranks), in seconds.
    """
    drawn = np.random.default_rng(seed).standard_normal((steps, ranks))
    with np.errstate(over="ignore"):  # `simulate` refuses times that are not finite
        return median * np.exp(sigma * drawn)


def long_tailed(steps: int, ranks: int, seed: int, median: float = MEDIAN) -> np.ndarray:
    """Return independent steps like those of reinforcement learning in Habitat.

    Args:
        steps, ranks: the number of steps of each rank, and of ranks.
        seed: the same seed gives the same steps.
        median: of the steps, in seconds, above 1.7: the only parameter that is our choice.

    Returns:
        float64 array of shape (steps, ranks), in seconds.

    Source: WAGMA-SGD, section V-D and Figure 9 (see the constants above).
    """
    sigma = math.log((LONGEST - SHORTEST) / (median - SHORTEST)) / LONGEST_QUANTILE
    tail = log_normal(steps, ranks, median - SHORTEST, sigma, seed)
    return np.minimum(SHORTEST + tail, LONGEST)


def recorded(trace: np.ndarray, steps: int, ranks: int, seed: int) -> np.ndarray:
    """Return the steps of a recorded trace.

    Args:
        trace: float64 array of shape (recorded steps, recorded ranks), in seconds.
        steps, ranks: the number of steps of each rank, and of ranks.
        seed: if there are more ranks or steps than the trace has, each rank repeats one of its
            columns; those beyond the trace's ranks begin at a random step.
    """
    length, width = trace.shape
    if steps <= length and ranks <= width:
        return np.ascontiguousarray(trace[:steps, :ranks])
    begins = np.random.default_rng(seed).integers(length, size=ranks)
    begins[:width] = 0
    return trace[(begins + np.arange(steps)[:, None]) % length, np.arange(ranks) % width]


def read_trace(path: Path) -> np.ndarray:
    """Return a recorded trace: seconds, a float64 array of shape (recorded steps, recorded ranks).

    Args:
        path: the directory of a run of ``wagma train``, of which each rank's compute and delay
            times are used, up to the last step of the rank with the fewest, without ranks that made
            none; or a text file with a line for each step and a column for each rank, in seconds,
            separated by commas or spaces.

    Raises:
        ValueError: it is neither; the message names the file, and the line if there is one.
        OSError: it cannot be read.
    """
    trace = _metrics(path) if path.is_dir() else _table(path)
    if not trace.size:
        raise ValueError(f"{path} has no steps")
    if not np.all(np.isfinite(trace) & (trace >= 0)):
        raise ValueError(f"{path} must hold seconds, 0 or more")
    return trace


def _metrics(run: Path) -> np.ndarray:
    files = metrics_files(run).values()
    if not files:
        raise ValueError(f"{run} has no rank-*.jsonl: is it a run of wagma train?")
    each = ([_seconds(file, *line) for line in enumerate(_lines(file), 1)] for file in files)
    columns = [column for column in each if column]  # a rank may only run a controller
    if not columns:
        return np.zeros((0, 0))
    length = min(map(len, columns))
    return np.array([column[:length] for column in columns], dtype=np.float64).T


def _seconds(file: Path, number: int, line: str) -> float:
    try:
        record = json.loads(line)
        return record["compute_s"] + record["delay_s"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}, line {number}: no record with compute_s and delay_s") from error


def _table(path: Path) -> np.ndarray:
    lines = [line for line in _lines(path) if line.split("#")[0].strip()]
    if not lines:
        return np.zeros((0, 0))
    try:
        return np.loadtxt(lines, ndmin=2, delimiter="," if "," in lines[0] else None)
    except ValueError as error:
        raise ValueError(f"{path} is not a table of seconds: {error}") from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file") from error


def delayed(
    steps: np.ndarray,
    kind: str,
    seed: int,
    scale: float = 1.0,
    slow_ranks: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Return steps with a paper's injected delays, drawn as ``wagma train`` draws them.

    Args:
        steps: seconds without delays, a float64 array of shape (steps, ranks).
        kind: one of `imbalance.KINDS`.
        seed: the same seed gives the same delays.
        scale: factor by which the delays are multiplied.
        slow_ranks: by rank, the factor by which its steps take longer, in addition.
    """
    made = steps.copy()
    for rank, factor in (slow_ranks or {}).items():
        made[:, rank] += imbalance.slow_rank_delay(factor, steps[:, rank])
    if kind != "none":
        for step, compute in enumerate(steps):
            made[step] += scale * imbalance.delays(kind, seed, step, compute)
    return made
