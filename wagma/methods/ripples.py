"""Ripples (Luo et al.), later published as Prague."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import CONTROLLER_ONLY, CONTROLLER_RANK, GROUP_SIZE, SYNC_EVERY, TRANSPORT


def no_controller(options: Mapping[str, Any], ranks: int) -> str | None:
    """Say why these options leave nothing to do for a controller."""
    if options["controller_only"] and options["groups"] == "static":
        return "a controller only, but groups=static needs none"
    return None


METHOD = Method(
    "ripples",
    "models in groups, of 3 if not given, that a generator makes when a rank asks for one; only "
    "members wait for each other",
    optimizer="wagma.optim.Ripples",
    simulated="wagma.simulation.ripples.ripples",
    options=(
        Option(
            "groups",
            "how they are made: a new random one for every step; of all ranks that wait for "
            "nobody at once, without those that are too slow; by a schedule",
            "smart",
            choices=("random", "smart", "static"),
        ),
        Option(
            "threshold",
            "steps by which a rank is too slow for groups=smart",
            4,
            convert=whole(1),
            metavar="C",
        ),
        Option(
            "ranks_per_node",
            "ranks that count as a node for groups=smart and static",
            convert=whole(1),
            metavar="N",
            otherwise="MPI's",
        ),
        GROUP_SIZE,
        SYNC_EVERY,
        CONTROLLER_RANK,
        CONTROLLER_ONLY,
        TRANSPORT,
    ),
    color="#117733",
    seeded=True,
    conflict=no_controller,
)
