"""Optimizers that average models or gradients between ranks during training. They need torch."""

from wagma.optim.adpsgd import ADPSGD
from wagma.optim.allreduce import Allreduce
from wagma.optim.dpsgd import DPSGD
from wagma.optim.eager_sgd import EagerSGD
from wagma.optim.hop import Hop
from wagma.optim.local_sgd import LocalSGD
from wagma.optim.parameter_server import ParameterServer
from wagma.optim.partial_reduce import PartialReduce
from wagma.optim.ripples import Ripples
from wagma.optim.sgp import SGP
from wagma.optim.wagma import WAGMA

__all__ = [
    "ADPSGD",
    "DPSGD",
    "SGP",
    "WAGMA",
    "Allreduce",
    "EagerSGD",
    "Hop",
    "LocalSGD",
    "ParameterServer",
    "PartialReduce",
    "Ripples",
]
