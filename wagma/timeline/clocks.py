"""The ranks' clocks on one scale, by the comparisons that their files have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from wagma.timeline.rings import Ring

LONG_ENOUGH = 100_000_000  # nanoseconds between comparisons that tell a drift


@dataclass(frozen=True)
class Clock:
    """How a rank's times become those of the reference.

    Attributes:
        aligned: whether they do; else they are put at the beginning, for want of anything better.
        how: in words.
        times, offsets: when clocks were compared, on the rank's, and how far the reference was
            ahead then, in ns.
        error: the largest error of an offset, in ns.
    """

    aligned: bool
    how: str
    times: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    error: int = 0

    @property
    def drift(self) -> float | None:
        """How much faster the reference runs, in parts per million; None: not known."""
        if len(self.times) < 2 or self.times[-1] - self.times[0] < LONG_ENOUGH:
            return None
        lasted = self.times[-1] - self.times[0]
        return 1e6 * (self.offsets[-1] - self.offsets[0]) / lasted

    def to_reference(self, times: np.ndarray) -> np.ndarray:
        """Return these times, int64 nanoseconds, on the reference's clock.

        Between two comparisons the offset is interpolated.
        """
        if not self.times:
            return times
        begin, first = self.times[0], self.offsets[0]
        known = np.array(self.times) - begin, np.array(self.offsets) - first
        return times + first + np.rint(np.interp(times - begin, *known)).astype(np.int64)

    def in_words(self) -> str:
        """Return how exact it is, for the trace."""
        if not self.aligned:
            return self.how
        drift = "drift unknown" if self.drift is None else f"drift {self.drift:+.2f} ppm"
        exact = f"±{self.error / 1000:.1f} µs, {drift}" if self.times else ""
        return ", ".join(filter(None, (self.how, exact)))


def align(rings: list[Ring]) -> dict[int, Clock]:
    """Return each rank's clock, by rank.

    The reference is the rank that most have compared themselves with. A rank that has not done so
    itself is aligned by way of one whose clock it shares, or of the rank it has been compared with.
    """
    compared = {ring.rank: ring.about["clocks"] for ring in rings}
    counts = Counter(mine[0][0] for mine in compared.values() if mine)
    if not counts:
        reference = min(compared)
    else:
        reference = min(counts, key=lambda rank: (-counts[rank], rank))
    found = {reference: Clock(True, "the reference")} if reference in compared else {}
    identity = {ring.rank: ring.about["clock"] for ring in rings}
    for rank, mine in compared.items():
        direct = [each for each in mine if each[0] == reference]
        if direct and rank != reference:
            found[rank] = clock_of(direct, identity.get(reference) == identity[rank])
    left = {rank: mine for rank, mine in compared.items() if rank not in found}
    count = -1
    while count != len(found):  # each that is aligned may align others
        count = len(found)
        for rank, mine in left.items():
            if rank not in found and (clock := by_way(rank, mine, identity, found)):
                found[rank] = clock
    unknown = Clock(False, "NOT ALIGNED: its clock was not compared")
    return found | {rank: unknown for rank in left if rank not in found}


def by_way(
    rank: int, mine: list[list[int]], identity: dict[int, str], found: dict[int, Clock]
) -> Clock | None:
    """Return a rank's clock by way of one that is aligned, None if there is no such one.

    Args:
        rank: the rank.
        mine: its comparisons.
        identity: each rank's machine.
        found: the clocks of ranks that are aligned.
    """
    for other, clock in found.items():
        if identity[other] == identity[rank]:
            how = f"the clock of rank {other}, on the same machine"
            return Clock(True, how, clock.times, clock.offsets, clock.error)
    for other, *_ in mine:
        if other in found and other != rank:
            own = clock_of([each for each in mine if each[0] == other])
            return chained(own, found[other], other)
    return None


def clock_of(comparisons: list[list[int]], same: bool = False) -> Clock:
    """Return the clock of a rank that was compared with the reference so often.

    Args:
        comparisons: see `collectives.timeline.Recording`.
        same: whether both are processes of one machine, which has one clock.
    """
    ordered = sorted({each[1]: each for each in comparisons}.values(), key=lambda each: each[1])
    _, times, offsets, errors = zip(*ordered)
    if same and all(abs(offset) <= error for offset, error in zip(offsets, errors)):
        how = "the clock of the reference's machine, as comparisons confirm"
        return Clock(True, how, times, (0,) * len(times), max(errors))
    return Clock(True, "compared with the reference", times, offsets, max(errors))


def chained(own: Clock, other: Clock, rank: int) -> Clock:
    """Return a clock that was compared with another rank's, whose clock is known."""
    there = np.array(own.times) + np.array(own.offsets)
    offsets = other.to_reference(there) - np.array(own.times)
    how = f"compared by way of rank {rank}"
    return Clock(True, how, own.times, tuple(map(int, offsets)), own.error + other.error)
