"""Partial Reduce (Miao et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wagma.arguments import number, whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import CONTROLLER_ONLY, CONTROLLER_RANK, GROUP_SIZE, SYNC_EVERY, TRANSPORT


def check(options: Mapping[str, Any], ranks: int) -> None:
    """Raise ValueError if there are no such groups in a job of so many ranks."""
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


METHOD = Method(
    "partial-reduce",
    "models in groups of the ranks that are ready first",
    optimizer="wagma.optim.PartialReduce",
    simulated="wagma.simulation.partial_reduce.partial_reduce",
    options=(
        Option(
            "weights",
            "weights of a group's models: equal, lower for an older iteration, whose models share "
            "it, or lower for each older model",
            "constant",
            choices=("constant", "dynamic", "dynamic-each"),
            simulated=False,
        ),
        Option(
            "alpha",
            "with weights other than constant, the factor by which one iteration of age reduces a "
            "model's weight",
            0.5,
            convert=number("of at least 0 and below 1", lambda value: 0 <= value < 1),
            metavar="A",
            simulated=False,
        ),
        Option(
            "missing",
            "with weights=dynamic, where the weight of an iteration that no member has goes: to "
            "the nearest iteration that one has, or to the initial model",
            "nearest",
            choices=("nearest", "initial"),
            simulated=False,
        ),
        Option(
            "history",
            "number of recent groups that must connect all ranks; if they do not, the controller "
            "forms a group that joins separate parts",
            convert=whole(1),
            metavar="T",
            otherwise="enough to connect N ranks: (N / S) (ln N + 3)",
        ),
        GROUP_SIZE,
        SYNC_EVERY,
        CONTROLLER_RANK,
        CONTROLLER_ONLY,
        TRANSPORT,
    ),
    color="#661100",
    combination=check,
)
