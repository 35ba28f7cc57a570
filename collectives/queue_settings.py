"""The settings of `QueuedNeighborAverage`: their defaults, and checks of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import graphs
from collectives.settings import checked_integer, is_integer

__all__ = ["QueueSettings"]

MODES = ("standard", "notify-ack")
ORDERS = ("parallel", "serial")
MEANS = ("weighted", "simple")
# The largest number of iterations in a setting: the updates of that many may be kept.
MOST = 2**20
# The default of `max_gap`, unless the staleness needs more.
DEFAULT_GAP = 5


@dataclasses.dataclass(frozen=True)
class QueueSettings:
    """All settings of `QueuedNeighborAverage` but the graph: see there."""

    max_gap: int | str | None = "auto"
    backup: int | Sequence[int] = 0
    staleness: int | None = None
    mean: str = "weighted"
    max_skip: int = 0
    skip_trigger: int | None = None
    mode: str = "standard"
    order: str = "parallel"

    def checked(self, edges: graphs.Edges, size: int) -> QueueSettings:
        """Return the checked settings, with "auto" and defaults resolved.

        Args:
            edges, size: the graph and its number of ranks, as in `collectives.graphs`.

        Raises:
            TypeError, ValueError: a setting is invalid, or settings conflict.
        """
        for name, allowed in (("mode", MODES), ("order", ORDERS), ("mean", MEANS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, not one of {', '.join(allowed)}")
        staleness, max_gap = self.staleness, self.max_gap
        if staleness is not None:
            staleness = checked_integer("staleness", staleness, 0, MOST - 2)
        if max_gap == "auto":
            max_gap = DEFAULT_GAP if staleness is None else max(DEFAULT_GAP, staleness + 2)
        elif max_gap is not None:
            max_gap = checked_integer("max_gap", max_gap, 1, MOST)
        backup = self._checked_backup([len(of) for of in graphs.neighbor_lists(edges, size)[1]])
        max_skip = checked_integer("max_skip", self.max_skip, 0, MOST)
        trigger = 1 if self.skip_trigger is None else self.skip_trigger
        if self.mode == "notify-ack":
            if backup or staleness is not None or max_skip:
                raise ValueError("notify-ack cannot be combined with backup, staleness or max_skip")
            max_gap = None
        elif max_gap is None and (backup or max_skip):
            raise ValueError(
                f"max_gap is None, but {'backup' if backup else 'max_skip'} needs tokens: without "
                "them nothing limits the gap between ranks"
            )
        return dataclasses.replace(
            self,
            max_gap=max_gap,
            backup=backup,
            staleness=staleness,
            max_skip=max_skip,
            skip_trigger=checked_integer("skip_trigger", trigger, 0, MOST),
        )

    def _checked_backup(self, neighbors: list[int]) -> int | tuple[int, ...]:
        """Return `backup`, as one number if all ranks have the same.

        Args:
            neighbors: for each rank, the number of ranks whose vectors it averages with its own.
        """
        if isinstance(self.backup, str) or not isinstance(self.backup, (Sequence, np.ndarray)):
            return checked_integer("backup", self.backup, 0, min(neighbors))
        if len(self.backup) != len(neighbors):
            raise ValueError(
                f"backup has {len(self.backup)} numbers, not one for each of {len(neighbors)} ranks"
            )
        each = tuple(
            checked_integer(f"backup[{rank}]", count, 0, most)
            for rank, (count, most) in enumerate(zip(self.backup, neighbors))
        )
        return each[0] if len(set(each)) == 1 else each

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the arguments of a rank's protocol, from checked settings."""
        chosen = dataclasses.asdict(self)
        if not is_integer(self.backup):
            chosen["backup"] = chosen["backup"][rank]
        return chosen

    def inert(self, edges: graphs.Edges, size: int) -> str | None:
        """Return a warning if the checked staleness never makes a rank wait, else None.

        Staleness lets a rank i be s + 1 iterations ahead of a source j; tokens let it be max_gap
        ahead for each edge on the shortest path from i to j. If the tokens' limit is lower or
        equal, it waits for a token, and any larger s gives the same run. (With order="serial" a
        vector is sent later than the token, so at equal limits a rank waits for the vector.)

        Source: Luo et al., Hop, 2019, Table 1: (s + 1) × length(j → i) and max_ig × length(i → j).
        """
        if self.staleness is None or self.max_gap is None or size == 1:
            return None
        assert isinstance(self.max_gap, int)  # checked
        ahead = self.staleness + (1 if self.order == "serial" else 2)
        if self.max_gap >= ahead:  # spares a search of paths, which takes long for many ranks
            return None
        least = -(-ahead // graphs.longest_way_back(edges, size))
        if self.max_gap >= least:
            return None
        return (
            f"staleness {self.staleness} never makes a rank wait, because max_gap {self.max_gap} "
            f"does so earlier: it takes a max_gap of at least {least}"
        )
