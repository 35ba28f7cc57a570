"""Who is slow: ranks whose steps are longer than the others', and in which pattern.

A step is compared with the same step of the other ranks, in two ways. *How much* longer it is, by
the logarithm of its time divided by the ranks' lower median, so that half of the ranks may be slow;
spreads are median absolute deviations. *Whether* that is by chance, by the place of its time among
the ranks' times of the step: of ranks that are alike, all places are equally likely, whatever the
distribution of the times. A rank must be slow by both, and stand out from the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["ENOUGH", "Found", "find", "lower_median"]

ENOUGH = 16  # steps that are needed
LEAST = 0.05  # of a step: a smaller excess does not matter
PAUSE = 0.2  # of a step: a smaller excess of a single step is no pause
MATTERS = 0.02  # of the rank's time, in single slow steps
SURE = 5.0  # standard deviations of a single slow step
CHANCE = 1e-4  # that a rank is called slow that is like the others
OUTSTANDING = 3.0  # times the excess of the other ranks, in the median
MOST = 0.9  # the share of the steps that is all of them
SEVERAL = 8  # ranks whose spread can be told
HALF = 0.6  # standard deviation of the lower half of normal numbers
NORMAL = 1.4826  # standard deviations in a median absolute deviation, of normal numbers
LEAST_SPREAD = 0.004  # of logarithms: clocks and schedulers
SCATTERED = 0.25  # of the excess of single slow steps, that the others may have
REGULAR = 0.8  # the share of equal distances with which slow steps are regular


@dataclass(frozen=True)
class Found:
    """A rank that is slow.

    Attributes:
        rank: its index.
        pattern: one of `findings.PATTERNS`.
        slow: bool array of shape (steps,): its slow steps.
        since, phases, every: as in `findings.Straggler`.
    """

    rank: int
    pattern: str
    slow: np.ndarray
    since: int | None = None
    phases: tuple[tuple[int, int], ...] = ()
    every: int | None = None


def lower_median(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the median; of an even number of values the lower one of the two in the middle."""
    count = values.shape[axis]
    return np.take(np.sort(values, axis), (count - 1) // 2, axis)


def find(times: np.ndarray) -> list[Found]:
    """Return the ranks that are slow.

    Args:
        times: seconds of the ranks' own steps, of equal work: float64 array of shape (steps,
            ranks), above 0.
    """
    if len(times) < ENOUGH or times.shape[1] < 2:
        return []
    compared = Compared(times)
    found = [compared.pattern_of(rank) for rank in range(times.shape[1])]
    return [each for each in found if each is not None]


class Compared:
    """The steps of all ranks, each compared with the others'.

    Args:
        times: as for `find`.

    Attributes:
        logs: logarithms of the times divided by the step's lower median, float64 array of shape
            (steps, ranks).
        smooth: running medians of `logs` over `width` steps.
        places: of the times among those of the step, -1/2 to 1/2, of the same shape.
        variance: of the mean of `width` places.
        outlying: above which a single step is slow.
        runs: of each rank, the runs of steps in which `smooth` is slow, as pairs of begin and end.
        excess, pauses: of each rank, its excess in these runs, as a share of its steps, and the
            number of times that it was slow for single steps.
    """

    def __init__(self, times: np.ndarray) -> None:
        count, ranks = times.shape
        logs = np.log(times / lower_median(times)[:, None])
        self.logs = logs - lower_median(np.median(logs, axis=0))
        self.width = min(max(count // 20, 5), 25) | 1
        self.smooth = np.column_stack([running_median(each, self.width) for each in self.logs.T])
        self.places = (times.argsort(axis=1).argsort(axis=1) + 0.5) / ranks - 0.5
        self.variance = variance_of(self.places, self.width)
        spread = float(np.sort(deviation(self.logs - self.smooth))[ranks // 2])
        self.outlying = max(math.log1p(PAUSE), SURE * max(LEAST_SPREAD, spread))
        self.runs = [self.runs_of_rank(rank) for rank in range(ranks)]
        self.excess = np.array([self.excess_in(rank, self.runs[rank]) for rank in range(ranks)])
        self.pauses = np.array([len(runs_of(column > self.outlying)) for column in self.logs.T])

    def runs_of_rank(self, rank: int) -> list[tuple[int, int]]:
        """Return the runs of many steps in which a rank is slow, by chance or not."""
        runs = joined(runs_of(self.smooth[:, rank] > math.log1p(LEAST)), self.width)
        runs = [(begin, end) for begin, end in runs if end - begin >= self.width]
        levels = [np.median(self.logs[begin:end, rank]) for begin, end in runs]
        return [run for run, level in zip(runs, levels) if level > max(levels) / 2]

    def excess_in(self, rank: int, runs: list[tuple[int, int]]) -> float:
        """Return the rank's excess in these runs, in mean steps of the others, per step."""
        found = np.expm1(self.logs[inside(runs, len(self.logs)), rank])
        return float(found.sum()) / len(self.logs)

    def is_chance(self, rank: int, runs: list[tuple[int, int]]) -> bool:
        """Return whether a rank like the others may have these slow runs, found among all."""
        count, ranks = self.places.shape
        chosen = inside(runs, count)
        deviations = self.places[chosen, rank].sum() / math.sqrt(
            self.variance * self.width * chosen.sum()
        )
        # Of normal numbers, as many as there are choices; a shorter run has more of them.
        choices = sum(math.log(count / (end - begin)) for begin, end in runs)
        return bool(deviations < math.sqrt(2 * (math.log(ranks / CHANCE) + choices)))

    def stands_out(self, rank: int, chosen: np.ndarray) -> bool:
        """Return whether the others are not slow for many steps as well, at these or at others."""
        others = np.median(np.delete(self.excess, rank))
        levels = np.sort(np.median(self.logs[chosen], axis=0))
        half = levels[: (len(levels) + 1) // 2]  # those that are surely not slow
        spread = float(half.std()) / HALF if len(levels) >= SEVERAL else 0.0
        level = np.median(self.logs[chosen, rank]) - half[-1]
        return bool(self.excess[rank] > OUTSTANDING * others and level > SURE * spread)

    def pattern_of(self, rank: int) -> Found | None:
        """Return a rank's pattern; None: it is not slow."""
        single, sustained = self.now_and_then(rank), self.sustained(rank)
        if single is None or sustained is None:
            return single or sustained
        logs, rest = self.logs[:, rank], sustained.slow & ~single.slow
        if rest.sum() < (1 - MOST) * sustained.slow.sum():
            return sustained
        scattered = np.median(logs[rest]) < SCATTERED * np.median(logs[single.slow])
        return single if scattered else sustained

    def sustained(self, rank: int) -> Found | None:
        """Return the pattern of a rank that is slow for many steps in a row."""
        runs, count, logs = self.runs[rank], len(self.logs), self.logs[:, rank]
        everything = [(0, count)]
        middle = float(np.median(logs))
        if middle > math.log1p(LEAST) and not self.is_chance(rank, everything):
            rest = ~inside(runs, count)
            same = rest.sum() < self.width or np.median(logs[rest]) > middle / 3
            runs = everything if same else runs
        elif not runs or self.is_chance(rank, runs):
            return None
        chosen = inside(runs, count)
        if not self.stands_out(rank, chosen):
            return None
        level = float(np.median(logs[chosen]))
        slow = chosen & (logs > max(math.log1p(LEAST), level / 2))
        since = int(np.argmax(slow))
        to_the_end = runs[-1][1] >= count - self.width
        if to_the_end and grows(self.smooth[:, rank], since):
            return Found(rank, "growing", slow, since)
        if chosen.mean() >= MOST:
            return Found(rank, "always", slow)
        if len(runs) == 1 and to_the_end:
            return Found(rank, "from a step on", slow, since)
        phases = tuple((begin, end - 1) for begin, end in runs)
        return Found(rank, "in phases", slow, phases=phases)

    def now_and_then(self, rank: int) -> Found | None:
        """Return that single steps of a rank are slow, more often than those of the others."""
        slow = self.logs[:, rank] > self.outlying
        runs = runs_of(slow)
        others = float(np.median(np.delete(self.pauses, rank)))
        expected = max(0.5, 1.3 * others + 2 * math.sqrt(others))
        if chance_of(len(runs), expected) > CHANCE:
            return None
        excess = np.expm1(self.logs[slow, rank]).sum()
        if excess < MATTERS * len(slow):
            return None
        return Found(rank, "now and then", slow, every=regular([begin for begin, _ in runs]))


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """Return the median of the `width` values around each; the first and last ones are repeated."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def chance_of(count: int, expected: float) -> float:
    """Return the probability of `count` events or more, of Poisson's distribution."""
    fewer = (number * math.log(expected) - math.lgamma(number + 1) for number in range(count))
    return 1 - sum(math.exp(each - expected) for each in fewer)


def deviation(values: np.ndarray) -> np.ndarray:
    """Return each column's standard deviation, by its median absolute deviation."""
    return NORMAL * np.median(np.abs(values - np.median(values, axis=0)), axis=0)


def variance_of(places: np.ndarray, width: int) -> float:
    """Return the variance of the mean of `width` places of a rank, one after the other.

    It is larger than that of places drawn independently if ranks are slow for some time; it is
    estimated by the differences of neighboring means, on which a rank that becomes slow has no
    effect.
    """
    ranks = places.shape[1]
    found = [(1 - 1 / ranks**2) / 12]
    for steps, needed in ((width, 8), (4 * width, 16)):
        if len(places) >= needed * steps:
            means = places[: len(places) // steps * steps].reshape(-1, steps, ranks).mean(axis=1)
            spread = NORMAL * np.median(np.abs(np.diff(means, axis=0)), axis=0)
            found.append(steps * float(lower_median(spread)) ** 2 / 2)
    return max(found) / width


def inside(runs: list[tuple[int, int]], count: int) -> np.ndarray:
    """Return which of `count` steps are in the runs."""
    chosen = np.zeros(count, dtype=bool)
    for begin, end in runs:
        chosen[begin:end] = True
    return chosen


def runs_of(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2])]


def joined(runs: list[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Return the runs, those with a gap of at most so many steps between them in one."""
    made: list[tuple[int, int]] = []
    for begin, end in runs:
        if made and begin - made[-1][1] <= gap:
            made[-1] = made[-1][0], end
        else:
            made.append((begin, end))
    return made


def grows(smooth: np.ndarray, since: int) -> bool:
    """Return whether a ramp describes the excess better than a step of the same beginning."""
    excess = np.expm1(smooth)
    count = len(excess)
    before = np.arange(count) < since
    flat = np.where(before, np.median(excess[:since]) if since else 0.0, np.median(excess[since:]))
    errors = []
    for knee in np.unique(np.linspace(0, since, 9, dtype=int)):
        ramp = np.maximum(0.0, np.arange(count) - knee)
        slope = np.median(excess[since:] / ramp[since:].clip(1))
        errors.append(np.abs(excess - slope * ramp).mean())
    return min(errors) < 0.7 * np.abs(excess - flat).mean()


def regular(begins: list[int]) -> int | None:
    """Return the distance of slow steps if most have the same one."""
    distances = np.diff(begins)
    usual = int(np.median(distances))
    return usual if (distances == usual).mean() >= REGULAR else None
