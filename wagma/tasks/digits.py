"""Scikit-learn's handwritten digits, and a small convolutional network for them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

from wagma import data
from wagma.job import from_rank_0
from wagma.tasks.classification import Batch, accuracy, cross_entropy
from wagma.tasks.contract import Task


def small_cnn() -> nn.Module:
    """Return a network for 8 × 8 images and ten classes, with 6,090 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def task(shards: str, comm, alpha: float | None = None) -> Task:
    """Return the digits as a task; collective, since only rank 0 reads them.

    Args:
        shards: How the training set is divided: see `data.shard`.
        comm: An mpi4py communicator.
        alpha: For "dirichlet" shards.
    """
    train_set, test_set = from_rank_0(data.load_digits, comm)
    loaders = partial(batches, train_set, test_set, shards, alpha)
    return Task("digits", small_cnn, loaders, cross_entropy, accuracy)


def batches(
    train_set: data.Images,
    test_set: data.Images,
    shards: str,
    alpha: float | None,
    rank: int,
    size: int,
    batch_size: int,
    seed: int,
) -> tuple[data.Batches, list[Batch]]:
    """Return a rank's batches without end, and its part of the test set as one batch."""
    images, labels = map(torch.from_numpy, train_set)
    shard = data.shard(train_set.labels, rank, size, shards, seed, alpha)
    part = slice(rank, None, size)
    test = [(torch.from_numpy(test_set.images[part]), torch.from_numpy(test_set.labels[part]))]

    def fetch(indices: np.ndarray) -> Batch:
        batch = torch.from_numpy(indices)
        return images[batch], labels[batch]

    return data.Batches(shard, batch_size, rank, seed, fetch), test
