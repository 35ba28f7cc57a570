"""What tests of collectives with arrays on devices share: each collective, in lockstep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import collectives


@dataclass(frozen=True)
class Case:
    """A collective whose results do not depend on who comes first, where ranks are in lockstep.

    Attributes:
        kind: its class.
        options: its arguments, a function of the number of ranks.
    """

    kind: Callable
    options: Callable = field(default=lambda size: {})

    def make(self, comm, like):
        return self.kind(comm, like, **self.options(comm.size))


CASES = {
    "group": Case(collectives.GroupAllreduce, lambda size: {"wait": "group", "sync_period": 3}),
    "group, paper": Case(
        collectives.GroupAllreduce,
        lambda size: {"wait": "group", "sync_period": 4, "late": "paper", "group_size": 2},
    ),
    "partial": Case(collectives.PartialAllreduce, lambda size: {"sync_period": 1}),
    "triggered": Case(
        collectives.TriggeredAverage, lambda size: {"sync_period": 1, "weights": "wp"}
    ),
    "ready": Case(collectives.ReadyGroupAllreduce, lambda size: {"group_size": size}),
    "ready, dynamic": Case(
        collectives.ReadyGroupAllreduce,
        lambda size: {"group_size": size, "weights": "dynamic", "missing": "initial"},
    ),
    "generated": Case(
        collectives.GeneratedGroupAllreduce,
        lambda size: {"groups": "static", "ranks_per_node": 2},
    ),
    "neighbors": Case(collectives.NeighborAverage),
    "queues": Case(collectives.QueuedNeighborAverage),
    "push-sum": Case(collectives.PushSum),
    "server": Case(collectives.ParameterServer),
    # Each alone, as an average that another rank asks for comes at any time.
    "pairs": Case(collectives.PairwiseAverage, lambda size: {"graph": None}),
}


def vectors_of(rank, size, lengths, dtypes):
    """Return a rank's arrays, small numbers that are exact in fp16 and bf16, too."""
    return [
        (((np.arange(length) * (3 + rank)) % 61 - 30) / 8 + rank / size).astype(dtype)
        for length, dtype in zip(lengths, dtypes)
    ]
