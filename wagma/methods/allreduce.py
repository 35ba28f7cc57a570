"""Allreduce-SGD, the baseline."""

from wagma.arguments import positive
from wagma.methods.method import Method, Option
from wagma.methods.shared import TRANSPORT

METHOD = Method(
    "allreduce",
    "gradients over all ranks, at every step",
    optimizer="wagma.optim.Allreduce",
    simulated="wagma.simulation.methods.allreduce",
    options=(
        Option(
            "compute_limit",
            "seconds of a step after which a rank begins no other of its --accumulate batches; the "
            "mean is over those that all ranks have computed",
            convert=positive,
            metavar="SECONDS",
            otherwise="no limit",
        ),
        TRANSPORT,
    ),
    color="#000000",
)
