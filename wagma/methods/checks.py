"""Converters of options' values, and checks for a number of ranks.

A check of one value returns why it is invalid, None if it is valid; `hop`, `partial_reduce`, … are
`Method.combination`s, which raise ValueError.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from wagma.arguments import number, whole
from wagma.methods.method import on_or_off

between_0_and_1 = number("between 0 and 1", lambda value: 0 < value < 1)
below_1 = number("of at least 0 and below 1", lambda value: 0 <= value < 1)


def graph_name(text: str) -> str:
    """Convert the name of a graph."""
    from collectives.graphs import check_name  # not at the top: it loads numpy

    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def period(text: str) -> bool | int | str:
    """Convert how often something is averaged: true, false, a number of versions, or all-ranks."""
    if text.lower() in ("true", "false"):
        return on_or_off(text)
    if text == "all-ranks":
        return text
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be true, false, a whole number from 1 on or all-ranks, not {text!r}"
        ) from None


def gap(text: str) -> int | str | None:
    """Convert "auto", "none", or a positive number of iterations."""
    if text.lower() in ("auto", "none"):
        return "auto" if text.lower() == "auto" else None
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or auto, or none") from None


def one_or_each(lowest: int) -> Callable[[str], int | tuple[int, ...]]:
    """Return a converter of a number of all ranks, "1", or that of each rank, "0+1+1+2"."""

    def convert(text: str) -> int | tuple[int, ...]:
        counts = tuple(map(whole(lowest), text.split("+")))
        return counts if len(counts) > 1 else counts[0]

    return convert


def larger_than_the_job(group_size: int | None, ranks: int) -> str | None:
    """Check that a group is not larger than the job."""
    if group_size is not None and group_size > ranks:
        return f"group_size is {group_size}, more than the number of ranks, {ranks}"
    return None


def outside_the_job(controller_rank: int, ranks: int) -> str | None:
    """Check that the controller's rank exists."""
    if controller_rank >= ranks:
        return f"controller_rank is {controller_rank}, but the last rank is {ranks - 1}"
    return None


def nobody_left(controller_only: bool, ranks: int) -> str | None:
    """Check that a rank trains beside the controller's."""
    return "--controller-only leaves no rank to train" if controller_only and ranks == 1 else None


def no_such_graph(name: str | None, ranks: int) -> str | None:
    """Check that so many ranks have a graph of this name."""
    from collectives.graphs import edges_of

    try:
        edges_of(name, ranks)
    except ValueError as error:
        return str(error)
    return None


def none_left(backups: int, ranks: int) -> str | None:
    """Check that a round does not omit all ranks."""
    if backups >= ranks:
        return f"backups is {backups}, but must be less than the number of ranks, {ranks}"
    return None


def too_many(neighbors: int, ranks: int) -> str | None:
    """Check that there are so many others to push to."""
    hops = max(1, (ranks - 1).bit_length())
    if neighbors > hops:
        return (
            f"neighbors is {neighbors}, but can be at most {hops}: distances are powers of two, "
            f"and the number of ranks is {ranks}"
        )
    return None


def parameter_server(options: Mapping[str, Any], ranks: int) -> None:
    """Check that the options belong to the mode, and to so many ranks."""
    for name, mode in MODE_OF.items():
        if options[name] not in (None, False) and options["mode"] != mode:
            raise ValueError(f"{name} is {options[name]}, but mode is not {mode}")
    counts = options["local_steps"]
    if isinstance(counts, tuple) and options["dynamic_steps"]:
        raise ValueError("local_steps has a number for each rank, but dynamic_steps is set")
    if isinstance(counts, tuple) and len(counts) != ranks:
        raise ValueError(
            f"local_steps has {len(counts)} numbers, not one for each of {ranks} ranks"
        )


# The mode that has an option, where others must not be given it.
MODE_OF = {
    "max_age": "ringmaster",
    "local_steps": "async-local",
    "dynamic_steps": "async-local",
    "outer_momentum": "async-local",
    "outer_rate": "async-local",
}


def partial_reduce(options: Mapping[str, Any], ranks: int) -> None:
    """Check that there are such groups in a job of so many ranks."""
    ranks -= options["controller_only"]
    if options["group_size"] is not None and options["group_size"] > ranks:
        raise ValueError(
            f"group_size is {options['group_size']}, more than the number of ranks that train, "
            f"{ranks}"
        )
    group_size = min(options["group_size"] or 3, ranks)
    if group_size < 2 and ranks > 1:
        raise ValueError("group_size is 1, but at least 2 ranks are needed to average")
    least = -(-(ranks - 1) // max(group_size - 1, 1))
    if options["history"] is not None and options["history"] < least:
        raise ValueError(
            f"history is {options['history']}, but at least {least} groups are needed to connect "
            "all ranks"
        )


def ripples(options: Mapping[str, Any], ranks: int) -> None:
    """Check that a controller is needed with these options if one is given."""
    if options["controller_only"] and options["groups"] == "static":
        raise ValueError("--controller-only is given, but groups=static needs no controller")


def hop(options: Mapping[str, Any], ranks: int) -> str | None:
    """Check the collective's settings and its graph; return why one has no effect."""
    from collectives.graphs import edges_of  # not at the top: they load numpy
    from collectives.queue_settings import QueueSettings

    edges = edges_of(options["graph"], ranks)
    settings = {name: options[name] for name in options.keys() - {"graph", "transport"}}
    return QueueSettings(**settings).checked(edges, ranks).inert(edges, ranks)
