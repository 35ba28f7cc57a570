"""Checkpoints of a training on several ranks: written atomically, continued from exactly.

A checkpoint is taken at an average over all ranks, so that the model is one: rank 0 writes it, and
every rank its own part. docs/checkpoints.md describes the files.
"""

from wagma.checkpoint.files import CheckpointError
from wagma.checkpoint.loading import Loaded, load
from wagma.checkpoint.saving import Saver, save

__all__ = ["CheckpointError", "Loaded", "Saver", "load", "save"]
