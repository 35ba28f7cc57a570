"""What a collective has done on one rank so far."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Statistics"]


class Statistics(NamedTuple):
    """Counts, and times in seconds, of one rank since the collective was made.

    Attributes:
        calls: calls that the application has completed, synchronous ones included.
        timely: those whose vector was in the average that they asked for.
        synchronizations: averages over all ranks that were published, periodic or not.
        versions: group averages that were executed here, whoever started them.
        passive: those to which this rank contributed an older vector than that of the same call.
        staleness: how many group averages were executed with a contribution of the age 0, 1, …,
            in versions; at most 1,000, where older ones are counted too.
        nonfinite: vectors of this rank that were left out because they were not finite.
        bytes_sent: bytes of vectors sent.
        waiting: time that calls spent waiting for other ranks.
        communicating: the rest of the time in calls: moving and averaging data.
        engine: time in which this rank's engine advanced something, in calls or beside them.
    """

    calls: int
    timely: int
    synchronizations: int
    versions: int
    passive: int
    staleness: tuple[int, ...]
    nonfinite: int
    bytes_sent: int
    waiting: float
    communicating: float
    engine: float
