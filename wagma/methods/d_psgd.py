"""D-PSGD (Lian et al.)."""

from wagma.methods.method import Method, Option
from wagma.methods.shared import TRANSPORT

METHOD = Method(
    "d-psgd",
    "models with both neighbors in a ring",
    optimizer="wagma.optim.DPSGD",
    simulated="wagma.simulation.peers.d_psgd",
    options=(
        Option(
            "clock",
            "whom a step waits for: the neighbors, or all ranks",
            "neighbors",
            choices=("neighbors", "global"),
        ),
        TRANSPORT,
    ),
    color="#009E73",
)
