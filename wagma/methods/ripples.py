"""Ripples (Luo et al.), later published as Prague."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import CONTROLLER_ONLY, CONTROLLER_RANK, GROUP_SIZE, SYNC_EVERY, TRANSPORT


def check(options: Mapping[str, Any], ranks: int) -> None:
    """Raise ValueError if no controller is needed with these options, but one is given."""
    if options["controller_only"] and options["groups"] == "static":
        raise ValueError("--controller-only is given, but groups=static needs no controller")


METHOD = Method(
    "ripples",
    "models in groups that a generator makes at a rank's request; only members wait for each other",
    optimizer="wagma.optim.Ripples",
    simulated="wagma.simulation.ripples.ripples",
    options=(
        Option(
            "groups",
            "how groups are made; random: a random one for each request; buffered: a random one "
            "where the rank is in none; smart: by dividing all ranks that are not waiting, except "
            "those too far behind; static: by a schedule",
            "smart",
            choices=("random", "buffered", "smart", "static"),
        ),
        Option(
            "threshold",
            "number of steps behind at which groups=smart leaves a rank out",
            4,
            convert=whole(1),
            metavar="C",
        ),
        Option(
            "ranks_per_node",
            "ranks per node, for groups=smart and groups=static",
            convert=whole(1),
            metavar="N",
            otherwise="as MPI reports",
        ),
        GROUP_SIZE,
        SYNC_EVERY,
        CONTROLLER_RANK,
        CONTROLLER_ONLY,
        TRANSPORT,
    ),
    color="#117733",
    seeded=True,
    combination=check,
)
