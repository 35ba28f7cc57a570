"""The result of a call."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Result"]


class Result(NamedTuple):
    """The result of a call of a collective on this rank.

    Attributes:
        version: number of this call, from 0.
        timely: whether this call's vector is in the average of its version: it is finite, and the
            version did not begin with an older one. Always true for the peer-to-peer collectives:
            the model returned contains this rank's changes.
        source: the version whose result was used; later than `version` if this rank was overtaken.
        group: the ranks whose vectors were averaged in `source`, sorted; for the peer-to-peer
            collectives the ranks whose models are in the one returned, as far as known.
        weight: the total weight of these vectors, without non-finite ones; for the peer-to-peer
            collectives the number of models averaged if known, else 1.
        synchronized: whether this was an average over all ranks.
        left_out: of the results of averagers, the names of this rank's tensors that were left out,
            as they were not finite: of buffers, and of a parameter whose gradient was not, or
            "update". Collectives count vectors that are left out in their statistics.
    """

    version: int
    timely: bool
    source: int
    group: tuple[int, ...]
    weight: float
    synchronized: bool
    left_out: tuple[str, ...] = ()
