"""Eager-SGD (Li et al.)."""

from wagma.methods.method import Method, Option
from wagma.methods.shared import SYNC_PERIOD, TRANSPORT

METHOD = Method(
    "eager-sgd",
    "gradients over all ranks, at every step, without waiting for stragglers; models, every "
    "--sync-period steps",
    optimizer="wagma.optim.EagerSGD",
    simulated="wagma.simulation.methods.eager_sgd",
    options=(
        Option(
            "trigger",
            "what starts an average: the first rank that calls, or one drawn at random",
            "solo",
            choices=("solo", "majority"),
        ),
        SYNC_PERIOD,
        TRANSPORT,
    ),
    color="#CC79A7",
)
