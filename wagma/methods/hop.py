"""Hop (Luo et al., ASPLOS 2019)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import GRAPH, TRANSPORT


def gap(text: str) -> int | str | None:
    """Convert "auto", "none", or a positive number of iterations."""
    if text.lower() in ("auto", "none"):
        return "auto" if text.lower() == "auto" else None
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or auto, or none") from None


def backups(text: str) -> int | tuple[int, ...]:
    """Convert the number of backups of all ranks, "1", or that of each rank, "0+1+1+2"."""
    counts = tuple(map(whole(0), text.split("+")))
    return counts if len(counts) > 1 else counts[0]


def check(options: Mapping[str, Any], ranks: int) -> str | None:
    """Check the collective's settings and its graph; return why one has no effect."""
    from collectives.graphs import edges_of  # not at the top: they load numpy
    from collectives.queue_settings import QueueSettings

    edges = edges_of(options["graph"], ranks)
    chosen = QueueSettings(**{option.name: options[option.name] for option in SETTINGS})
    return chosen.checked(edges, ranks).inert(edges, ranks)


SETTINGS = (
    Option(
        "max_gap",
        "number of iterations by which a rank may be ahead of ranks that average its model; auto: "
        "5, or staleness + 2 if that is more; none: no limit",
        "auto",
        convert=gap,
        metavar="N|auto|none",
    ),
    Option(
        "backup",
        "number of neighbors' models that an average may omit: one for all ranks, or one for each, "
        "such as 0+1+1+2 for four",
        0,
        convert=backups,
        metavar="B|B0+B1+…",
    ),
    Option(
        "staleness",
        "iterations by which a neighbor's model may be older than the rank's own",
        convert=whole(0),
        metavar="S",
        otherwise="none: a model is of the average's iteration, neither older nor newer",
    ),
    Option(
        "mean",
        "with staleness, whether newer models count more (weighted) or all alike (simple)",
        "weighted",
        choices=("weighted", "simple"),
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
        "a rank has fallen behind if it is more than this many iterations behind all that average "
        "its model",
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
    "models with the neighbors in a graph, some of which may be late or several steps behind",
    optimizer="wagma.optim.Hop",
    simulated="wagma.simulation.peer_methods.hop",
    options=(
        replace(GRAPH, default="ring-based"),
        *SETTINGS,
        TRANSPORT,
    ),
    color="#44AA99",
    combination=check,
)
