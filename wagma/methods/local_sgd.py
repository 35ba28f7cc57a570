"""Local SGD."""

from wagma.methods.method import Method
from wagma.methods.shared import SYNC_PERIOD, TRANSPORT, WIRE_DTYPE

METHOD = Method(
    "local-sgd",
    "models over all ranks, every --sync-period steps",
    optimizer="wagma.optim.LocalSGD",
    simulated="wagma.simulation.methods.local_sgd",
    options=(SYNC_PERIOD, WIRE_DTYPE, TRANSPORT),
    color="#0072B2",
)
