"""A parameter server, in four modes."""

from __future__ import annotations

from wagma.arguments import whole
from wagma.methods.method import Method, Option


def none_left(backups: int, ranks: int) -> str | None:
    """Return why a round cannot omit this many of a job's ranks; None: it can."""
    if backups >= ranks:
        return f"backups is {backups}, but must be less than the number of ranks, {ranks}"
    return None


METHOD = Method(
    "parameter-server",
    "updates, into one model on rank 0",
    optimizer="wagma.optim.ParameterServer",
    simulated="wagma.simulation.peers.parameter_server",
    options=(
        Option(
            "mode",
            "ranks that the server waits for; bsp: all; backup: all but the backups; asp: none; "
            "hete: none, with less weight for updates to old models",
            "bsp",
            choices=("bsp", "backup", "asp", "hete"),
        ),
        Option(
            "backups",
            "ranks that a round of mode=backup does not wait for",
            0,
            convert=whole(0),
            metavar="B",
            problem=none_left,
        ),
    ),
    color="#882255",
)
