"""Stochastic gradient push (Assran et al.)."""

from __future__ import annotations

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import TRANSPORT


def too_many(neighbors: int, ranks: int) -> str | None:
    """Return why a rank cannot push to this many others in a job of this size; None: it can."""
    hops = max(1, (ranks - 1).bit_length())
    if neighbors > hops:
        return (
            f"neighbors is {neighbors}, but can be at most {hops}: distances are powers of two, "
            f"and the number of ranks is {ranks}"
        )
    return None


METHOD = Method(
    "sgp",
    "shares of models, pushed to different ranks at every step",
    optimizer="wagma.optim.SGP",
    simulated="wagma.simulation.peer_methods.sgp",
    options=(
        Option(
            "neighbors",
            "ranks that each rank pushes to in a step, at distances that are powers of two",
            1,
            convert=whole(1),
            metavar="N",
            problem=too_many,
        ),
        TRANSPORT,
    ),
    color="#56B4E9",
)
