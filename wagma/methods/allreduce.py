"""Allreduce-SGD, the baseline."""

from wagma.methods.method import Method
from wagma.methods.shared import TRANSPORT

METHOD = Method(
    "allreduce",
    "gradients over all ranks, at every step",
    optimizer="wagma.optim.Allreduce",
    simulated="wagma.simulation.methods.allreduce",
    options=(TRANSPORT,),
    color="#000000",
)
