"""The loss and the metric of tasks whose batches are images and their labels."""

from __future__ import annotations

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of a batch.

    Args:
        model: Returns logits, shape (n, classes).
        batch: Images, shape (n, channels, height, width), and labels, int64, shape (n,).
    """
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the share of a batch's images that the model recognizes."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).double().mean().item()}
