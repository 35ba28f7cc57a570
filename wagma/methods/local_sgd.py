"""Local SGD."""

from wagma.methods.method import Method, Option
from wagma.methods.shared import (
    AVERAGE_STATE,
    CONTRACTION,
    CORRECTION,
    SYNC_PERIOD,
    TRANSPORT,
    WEIGHTS,
    WIRE_DTYPE,
)

METHOD = Method(
    "local-sgd",
    "models over all ranks, every --sync-period steps",
    optimizer="wagma.optim.LocalSGD",
    simulated="wagma.simulation.methods.local_sgd",
    options=(
        SYNC_PERIOD,
        Option(
            "trigger",
            "when all ranks average; count: when every rank has made --sync-period steps; solo: "
            "when the fastest has, and the others have completed their current step",
            "count",
            choices=("count", "solo"),
        ),
        AVERAGE_STATE,
        CORRECTION,
        WEIGHTS,
        CONTRACTION,
        WIRE_DTYPE,
        TRANSPORT,
    ),
    color="#0072B2",
)
