"""D-PSGD (Lian et al.)."""

from dataclasses import replace

from wagma.methods.method import Method, Option
from wagma.methods.shared import GRAPH, TRANSPORT

METHOD = Method(
    "d-psgd",
    "models with the neighbors in a graph",
    optimizer="wagma.optim.DPSGD",
    simulated="wagma.simulation.peer_methods.d_psgd",
    options=(
        replace(GRAPH, default="ring"),
        Option(
            "clock",
            "ranks that a step waits for: its neighbors, or all",
            "neighbors",
            choices=("neighbors", "global"),
        ),
        TRANSPORT,
    ),
    color="#009E73",
)
