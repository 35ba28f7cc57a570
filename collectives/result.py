"""What a call of a collective did."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Result"]


class Result(NamedTuple):
    """What a call of a collective did on this rank.

    Attributes:
        version: number of this call, from 0.
        timely: whether what this rank gave is in what it got: its vector was in the average of its
            own version, which had not begun with an older one of this rank, and it is finite.
            Always where ranks send each other models: their changes are in the model returned.
        source: the version whose result was used; later than `version` if this rank was overtaken.
        group: the ranks whose vectors were averaged in `source`, sorted; of the peers' collectives
            those whose models went into the one returned, as far as the method says it.
        weight: the total weight of their vectors, not counting non-finite ones; of the peers'
            collectives the number of models averaged, where the method says it, else 1.
        synchronized: whether it was the average over all ranks.
    """

    version: int
    timely: bool
    source: int
    group: tuple[int, ...]
    weight: float
    synchronized: bool
