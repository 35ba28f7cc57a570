"""Allreduce-SGD, which the others are compared with."""

from wagma.methods.method import Method
from wagma.methods.shared import TRANSPORT

METHOD = Method(
    "allreduce",
    "gradients over all ranks, in every step",
    optimizer="wagma.optim.Allreduce",
    simulated="wagma.simulation.methods.allreduce",
    options=(TRANSPORT,),
    color="#000000",
)
