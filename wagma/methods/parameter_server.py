"""A parameter server, in four modes."""

from __future__ import annotations

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import TRANSPORT


def none_left(backups: int, ranks: int) -> str | None:
    """Say why a round of such a job cannot do without so many ranks."""
    if backups >= ranks:
        return f"{backups} backups in a job of {ranks} ranks: one must be left"
    return None


METHOD = Method(
    "parameter-server",
    "one model on rank 0, to which all send updates, as its mode says",
    optimizer="wagma.optim.ParameterServer",
    simulated="wagma.simulation.peers.parameter_server",
    options=(
        Option(
            "mode",
            "whom the server waits for: all ranks; all but the backups; nobody; nobody, and "
            "updates to old models count less",
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
        TRANSPORT,
    ),
    color="#882255",
)
