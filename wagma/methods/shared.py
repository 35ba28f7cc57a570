"""Options that several methods have; commands also accept them for all methods at once."""

from __future__ import annotations

import argparse

from wagma.arguments import whole
from wagma.methods.method import Option, on_or_off


def larger_than_the_job(group_size: int | None, ranks: int) -> str | None:
    """Return why a job with this number of ranks has no groups of this size; None: it has."""
    if group_size is not None and group_size > ranks:
        return f"group_size is {group_size}, more than the number of ranks, {ranks}"
    return None


def outside_the_job(controller_rank: int, ranks: int) -> str | None:
    """Return why a job with this number of ranks has no such controller; None: it has."""
    if controller_rank >= ranks:
        return f"controller_rank is {controller_rank}, but the last rank is {ranks - 1}"
    return None


def nobody_left(controller_only: bool, ranks: int) -> str | None:
    """Return why a job has no rank left to train beside the controller's; None: it has."""
    return "--controller-only leaves no rank to train" if controller_only and ranks == 1 else None


def fraction(text: str) -> float:
    """Convert a number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, not {text!r}")
    return value


def graph_name(text: str) -> str:
    """Convert the name of a graph."""
    from collectives.graphs import check_name  # not at the top: it loads numpy

    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def no_such_graph(name: str | None, ranks: int) -> str | None:
    """Return why this number of ranks has no graph of this name; None: it has."""
    from collectives.graphs import edges_of

    try:
        edges_of(name, ranks)
    except ValueError as error:
        return str(error)
    return None


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


GROUP_SIZE = Option(
    "group_size",
    "ranks per group",
    convert=whole(1),
    metavar="S",
    otherwise="3; for wagma the square root of the number of ranks, rounded up to a power of two",
    problem=larger_than_the_job,
)
CONTROLLER_RANK = Option(
    "controller_rank",
    "rank whose engine forms the groups",
    0,
    convert=whole(0),
    metavar="R",
    simulated=False,
    problem=outside_the_job,
)
CONTROLLER_ONLY = Option(
    "controller_only",
    "do not train on the controller rank",
    False,
    convert=on_or_off,
    simulated=False,
    problem=nobody_left,
)
SYNC_EVERY = Option(
    "sync_every",
    "number of a rank's steps from one average to the next",
    1,
    convert=whole(1),
    metavar="STEPS",
)
SYNC_PERIOD = Option(
    "sync_period",
    "steps from one average over all ranks to the next",
    10,
    convert=whole(1),
    metavar="STEPS",
)
WIRE_DTYPE = Option(
    "wire_dtype",
    "send wider numbers in this data type",
    choices=("float16", "bfloat16"),
    otherwise="their own",
    simulated=False,
)
TRANSPORT = Option(
    "transport",
    "how the ranks of a node exchange models: in shared memory, or by messages",
    choices=("shared", "messages"),
    otherwise="shared where possible",
    simulated=False,
)
# Several methods have this option, each with its own default.
GRAPH = Option(
    "graph",
    "graph of the ranks: ring, ring-based, double-ring, or hierarchical-4+2+2 for machines with "
    "4, 2 and 2 ranks; -gateways-2 may follow",
    convert=graph_name,
    metavar="NAME",
    problem=no_such_graph,
)
WEIGHTS = Option(
    "weights",
    "weight of a rank's model: the one given to its last step, the sum of these since the last "
    "average over all ranks, or WP-SGD's weight for that sum",
    "given",
    choices=("given", "work", "wp"),
    simulated=False,
)
CONTRACTION = Option(
    "contraction",
    "factor by which a step brings a model closer to the optimum, for weights=wp",
    0.9,
    convert=fraction,
    metavar="R",
    simulated=False,
)
AVERAGE_STATE = Option(
    "average_state",
    "average the local optimizer's state, such as momentum, with the model, for ranks with "
    "different data",
    False,
    convert=on_or_off,
    simulated=False,
)
CORRECTION_EVERY = Option(
    "correction_every",
    "versions in which the mean of the ranks' gradients is averaged: every one, or those over all "
    "ranks",
    1,
    choices=("1", "all-ranks"),
    convert=period,
    simulated=False,
)
CORRECTION = Option(
    "correction",
    "correct gradients towards the mean of all ranks' gradients, for ranks with different data",
    choices=("control-variates",),
    otherwise="none",
    simulated=False,
)
SHARED = (
    GROUP_SIZE,
    SYNC_PERIOD,
    SYNC_EVERY,
    CONTROLLER_RANK,
    CONTROLLER_ONLY,
    WIRE_DTYPE,
    TRANSPORT,
)
