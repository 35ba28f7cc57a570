"""Counts and times of a collective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

__all__ = ["Statistics", "total"]

AGES = "staleness"  # the field that counts by age


class Statistics(NamedTuple):
    """Counts, and times in seconds, of one rank since the collective was constructed.

    Attributes:
        calls: calls that the application has completed, including synchronous ones.
        timely: calls whose own vector was in the average of their version.
        synchronizations: averages over all ranks, periodic or not, except those of `average`.
        versions: group averages that were executed on this rank, whichever rank started them.
        passive: those of `versions` to which this rank contributed an older vector than that of its
            call of the same number.
        staleness: number of group averages executed with a contribution of age 0, 1, …, in
            versions; age 1,000 includes all older contributions.
        left_out: vectors of this rank that were left out: those that were not finite, and changes
            since a call that an exception interrupted, if the vector before them is unknown.
        bytes_sent: bytes of vectors sent.
        in_place: averages that used this rank's vector where it is, in memory that ranks share: see
            `collectives.empty`.
        in_slots: averages of short vectors that each member made for itself, from copies in memory
            that ranks share.
        waiting: time that calls spent waiting for other ranks.
        communicating: the rest of the time in calls: moving and averaging data.
        engine: time in which this rank's engine made progress, in calls or outside them.
    """

    calls: int
    timely: int
    synchronizations: int
    versions: int
    passive: int
    staleness: tuple[int, ...]
    left_out: int
    bytes_sent: int
    in_place: int
    in_slots: int
    waiting: float
    communicating: float
    engine: float


def total(statistics: Sequence[Statistics]) -> Statistics:
    """Return the sums of the statistics of several collectives.

    Args:
        statistics: of at least one.
    """
    sums = {name: sum(each) for name, *each in zip(Statistics._fields, *statistics) if name != AGES}
    ages = zip_longest(*(each.staleness for each in statistics), fillvalue=0)
    return Statistics(**{**sums, AGES: tuple(map(sum, ages))})
