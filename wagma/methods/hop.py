"""Hop (Luo et al., ASPLOS 2019)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import GRAPH, TRANSPORT


def gap(text: str) -> int | None:
    """Convert a positive number of iterations, or none."""
    if text.lower() == "none":
        return None
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or none") from None


def no_such_setting(options: Mapping[str, Any], ranks: int) -> str | None:
    """Return the conflict of the options with each other, the graph or the number of ranks."""
    from collectives.graphs import edges_of  # not at the top: they load numpy
    from collectives.queued_neighbor_average import checked_settings

    chosen = {option.name: options[option.name] for option in SETTINGS}
    try:
        checked_settings(edges_of(options["graph"], ranks), ranks, **chosen)
    except ValueError as error:
        return str(error)
    return None


SETTINGS = (
    Option(
        "max_gap",
        "number of iterations by which a rank may be ahead of ranks that average its model; none: "
        "no limit",
        5,
        convert=gap,
        metavar="N|none",
    ),
    Option(
        "backup",
        "neighbors' models that an average may omit",
        0,
        convert=whole(0),
        metavar="B",
    ),
    Option(
        "staleness",
        "iterations by which a neighbor's model may be older than the rank's own",
        convert=whole(0),
        metavar="S",
        otherwise="all are of the same iteration",
    ),
    Option(
        "max_skip",
        "number of iterations that a rank may skip at once when it has fallen behind",
        0,
        convert=whole(0),
        metavar="N",
    ),
    Option(
        "skip_trigger",
        "a rank has fallen behind if it is more iterations than this behind all that average its "
        "model",
        1,
        convert=whole(0),
        metavar="N",
    ),
    Option(
        "mode",
        "a rank that is ahead waits for tokens (standard), or until all have averaged its last "
        "model (notify-ack)",
        "standard",
        choices=("standard", "notify-ack"),
    ),
    Option(
        "order",
        "whether a rank sends its model before its local update (parallel) or after it (serial)",
        "parallel",
        choices=("parallel", "serial"),
    ),
)
METHOD = Method(
    "hop",
    "models with the neighbors in a graph, of which some may be late or several steps behind",
    optimizer="wagma.optim.Hop",
    simulated="wagma.simulation.peers.hop",
    options=(
        replace(GRAPH, default="ring-based"),
        *SETTINGS,
        TRANSPORT,
    ),
    color="#44AA99",
    conflict=no_such_setting,
)
