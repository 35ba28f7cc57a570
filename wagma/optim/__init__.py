"""Optimisers that average models or gradients between ranks while they train (they need torch)."""

from wagma.optim.allreduce import Allreduce
from wagma.optim.eager_sgd import EagerSGD
from wagma.optim.local_sgd import LocalSGD
from wagma.optim.wagma import WAGMA

__all__ = ["WAGMA", "Allreduce", "EagerSGD", "LocalSGD"]
