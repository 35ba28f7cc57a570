"""A parameter server, in several modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wagma.arguments import not_negative, number, whole
from wagma.methods.method import Method, Option, on_or_off
from wagma.methods.shared import TRANSPORT


def none_left(backups: int, ranks: int) -> str | None:
    """Return why a round cannot omit this many of a job's ranks; None: it can."""
    if backups >= ranks:
        return f"backups is {backups}, but must be less than the number of ranks, {ranks}"
    return None


def steps(text: str) -> int | tuple[int, ...]:
    """Convert the number of local steps of all ranks, "10", or that of each, "10+10+10+3"."""
    counts = tuple(map(whole(1), text.split("+")))
    return counts if len(counts) > 1 else counts[0]


def momentum(text: str) -> float:
    """Convert an outer momentum."""
    return number("of at least 0 and below 1", lambda value: 0 <= value < 1)(text)


def check(options: Mapping[str, Any], ranks: int) -> None:
    """Raise ValueError if an option belongs to another mode, or not to so many ranks."""
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
METHOD = Method(
    "parameter-server",
    "updates, into one model on rank 0",
    optimizer="wagma.optim.ParameterServer",
    simulated="wagma.simulation.peer_methods.parameter_server",
    options=(
        Option(
            "mode",
            "ranks that the server waits for; bsp: all; backup: all but the backups; asp: none; "
            "hete: none, with less weight for updates to old models; ringmaster: none, and updates "
            "to models that are too old are dropped; async-local: none, and updates of several "
            "steps, into a model with momentum",
            "bsp",
            choices=("bsp", "backup", "asp", "hete", "ringmaster", "async-local"),
        ),
        Option(
            "backups",
            "ranks that a round of mode=backup does not wait for",
            0,
            convert=whole(0),
            metavar="B",
            problem=none_left,
        ),
        Option(
            "max_age",
            "with mode=ringmaster, an update is dropped if the model has taken this many others "
            "since the rank got it",
            convert=whole(1),
            metavar="R",
            otherwise="number of ranks",
        ),
        Option(
            "local_steps",
            "with mode=async-local, steps from one update that a rank sends to the next: one "
            "number for all ranks, or one for each, such as 10+10+10+3 if the last one is slow",
            convert=steps,
            metavar="H|H0+H1+…",
            otherwise="10",
        ),
        Option(
            "dynamic_steps",
            "with mode=async-local, the fastest rank makes local_steps, and the others as many as "
            "they can in the same time",
            False,
            convert=on_or_off,
        ),
        Option(
            "outer_momentum",
            "with mode=async-local, momentum of the server's model",
            convert=momentum,
            metavar="B",
            otherwise="0.9",
        ),
        Option(
            "outer_rate",
            "with mode=async-local, factor by which updates are multiplied",
            convert=not_negative,
            metavar="E",
            otherwise="1 - outer_momentum",
        ),
        TRANSPORT,
    ),
    color="#882255",
    combination=check,
)
