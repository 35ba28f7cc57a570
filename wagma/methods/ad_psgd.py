"""AD-PSGD (Lian et al.)."""

from dataclasses import replace

from wagma.arguments import whole
from wagma.methods.method import Method, Option
from wagma.methods.shared import AVERAGE_STATE, CORRECTION, GRAPH, TRANSPORT

METHOD = Method(
    "ad-psgd",
    "models of random pairs, in the background; no rank waits",
    optimizer="wagma.optim.ADPSGD",
    simulated="wagma.simulation.peer_methods.ad_psgd",
    options=(
        replace(GRAPH, otherwise="any two ranks may meet"),
        AVERAGE_STATE,
        CORRECTION,
        Option(
            "correction_period",
            "steps whose gradients a control variate is the mean of",
            10,
            convert=whole(1),
            metavar="STEPS",
            simulated=False,
        ),
        TRANSPORT,
    ),
    color="#E69F00",
    seeded=True,
)
