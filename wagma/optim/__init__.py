"""Optimisers that average models between ranks while they train (they need torch)."""

from wagma.optim.wagma import WAGMA

__all__ = ["WAGMA"]
