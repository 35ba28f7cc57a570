"""Ripples in simulated time; all decisions are those of its protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.generated_groups import check, generated, scheduled
from wagma.simulation.formed_groups import FormedGroupMethod
from wagma.simulation.methods import Settings

__all__ = ["ripples"]

GROUP_SIZE = 3


def ripples(settings: Settings, ranks: int) -> FormedGroupMethod:
    """Return Ripples' ranks; rank 0 generates groups. By default the nodes are the machine's.

    Raises:
        ValueError: an option is out of range.
    """
    groups, group_size = settings.groups or "smart", settings.group_size or GROUP_SIZE
    if ranks == 1:
        group_size = GROUP_SIZE  # one rank has no groups: any valid size will do
    check(ranks, groups, group_size, settings.threshold, settings.ranks_per_node, settings.seed, 0)
    makers: list[Callable[..., Any]] = []

    def make(port: Any, rank: int, size: int) -> Any:
        if not makers:
            per_node = settings.ranks_per_node or method.simulation.machine.ranks_per_node
            if groups == "static":
                makers.append(scheduled(size, per_node))
            else:
                nodes = [each // per_node for each in range(size)] if groups == "smart" else None
                chosen = group_size, settings.seed, nodes, settings.threshold
                buffered = groups == "buffered"
                makers.append(generated(size, *chosen, 0, buffered=buffered))
        return makers[0](port, rank, size)

    method = FormedGroupMethod(make, settings.nbytes, settings.sync_every)
    return method
