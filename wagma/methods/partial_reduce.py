"""Partial Reduce (Miao et al.)."""

from __future__ import annotations

from wagma.arguments import number, whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import GROUP_SIZE, TRANSPORT


def outside_the_job(controller_rank: int, ranks: int) -> str | None:
    """Say why a job of so many ranks has no such controller."""
    if controller_rank >= ranks:
        return f"a controller on rank {controller_rank} in a job of {ranks} ranks"
    return None


METHOD = Method(
    "partial-reduce",
    "models in groups, of 3 if not given, of the ranks that are ready first",
    optimizer="wagma.optim.PartialReduce",
    simulated="wagma.simulation.partial_reduce.partial_reduce",
    options=(
        Option(
            "weights",
            "all members of a group count alike, or less the older their models are",
            "constant",
            choices=("constant", "dynamic"),
            simulated=False,
        ),
        Option(
            "alpha",
            "how much models count with weights=dynamic that are one iteration older",
            0.5,
            convert=number("from 0 to below 1", lambda value: 0 <= value < 1),
            metavar="A",
            simulated=False,
        ),
        Option(
            "missing",
            "for what iterations count with weights=dynamic that no member has: for the nearest "
            "that one has, or for the initial model",
            "nearest",
            choices=("nearest", "initial"),
            simulated=False,
        ),
        Option(
            "history",
            "groups in which the controller looks at who has met whom, lest ranks stay among "
            "themselves",
            convert=whole(1),
            metavar="T",
            otherwise="enough to connect N ranks: (N / S) (ln N + 3)",
        ),
        Option(
            "controller_rank",
            "the rank whose engine forms groups",
            0,
            convert=whole(0),
            metavar="R",
            simulated=False,
            problem=outside_the_job,
        ),
        GROUP_SIZE,
        TRANSPORT,
    ),
    color="#661100",
)
