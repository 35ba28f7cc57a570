"""Eager-SGD (Li et al.)."""

from wagma.methods.method import Method, Option
from wagma.methods.shared import SYNC_PERIOD, TRANSPORT

METHOD = Method(
    "eager-sgd",
    "gradients, over all ranks as its trigger says; models, every --sync-period steps",
    optimizer="wagma.optim.EagerSGD",
    simulated="wagma.simulation.methods.eager_sgd",
    options=(
        Option(
            "trigger",
            "whom an average waits for: the first rank, or one drawn for each",
            "solo",
            choices=("solo", "majority"),
        ),
        SYNC_PERIOD,
        TRANSPORT,
    ),
    color="#CC79A7",
)
