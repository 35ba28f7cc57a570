"""Partial Reduce in simulated time; all decisions are those of its protocol."""

from __future__ import annotations

from typing import Any

from collectives.protocols.ready_controller import PartialReduceController
from collectives.protocols.ready_groups import ReadyGroupProtocol
from collectives.ready_groups import checked_group_size, checked_history
from wagma.simulation.formed_groups import FormedGroupMethod
from wagma.simulation.methods import Settings

__all__ = ["partial_reduce"]


def partial_reduce(settings: Settings, ranks: int) -> FormedGroupMethod:
    """Return Partial Reduce's ranks; rank 0 has the controller, and all weights are equal.

    Raises:
        ValueError: an option is out of range.
    """
    group_size = checked_group_size(settings.group_size if ranks > 1 else None, ranks)
    history = checked_history(settings.history, ranks, group_size)

    def make(port: Any, rank: int, size: int) -> Any:
        controller = None
        if rank == 0:
            controller = PartialReduceController(size, group_size, history, False, 0.5, True)
        return ReadyGroupProtocol(port, rank, size, 0, controller)

    return FormedGroupMethod(make, settings.nbytes, settings.sync_every)
