"""AD-PSGD (Lian et al.)."""

from wagma.methods.method import Method
from wagma.methods.shared import TRANSPORT

METHOD = Method(
    "ad-psgd",
    "models of random pairs, while they compute; nobody waits",
    optimizer="wagma.optim.ADPSGD",
    simulated="wagma.simulation.peers.ad_psgd",
    options=(TRANSPORT,),
    color="#E69F00",
    seeded=True,
)
