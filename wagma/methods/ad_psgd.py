"""AD-PSGD (Lian et al.)."""

from dataclasses import replace

from wagma.methods.method import Method
from wagma.methods.shared import GRAPH

METHOD = Method(
    "ad-psgd",
    "models of random pairs, in the background; no rank waits",
    optimizer="wagma.optim.ADPSGD",
    simulated="wagma.simulation.peer_methods.ad_psgd",
    options=(replace(GRAPH, otherwise="any two ranks may meet"),),
    color="#E69F00",
    seeded=True,
)
