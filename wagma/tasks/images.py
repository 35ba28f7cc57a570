"""Folders of images as a task: `wagma train --images DIR`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from wagma import data
from wagma.job import UsageError
from wagma.tasks.classification import Batch, accuracy, cross_entropy
from wagma.tasks.contract import Task
from wagma.tasks.folders import Files, Folders, select

CHANNELS = (3, 32, 64, 128)  # of the images, and of the output of each block of the network


class ImageError(UsageError):
    """A file is not an image that Pillow can decode."""


class Pictures(Dataset):
    """Images, decoded on access.

    Args:
        files: The files and their labels.
        image_size: Pixels of a side.
    """

    def __init__(self, files: Files, image_size: int) -> None:
        self.files, self.image_size = files, image_size

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, float32, shape (3, image_size, image_size), and its label."""
        return decode(self.files.paths[index], self.image_size), int(self.files.labels[index])


def decode(path: Path, image_size: int) -> torch.Tensor:
    """Return a file's image as RGB in [-1, 1]: its middle square, resized.

    Args:
        path: The file.
        image_size: Pixels of a side.

    Returns:
        float32, shape (3, image_size, image_size).

    Raises:
        ImageError: It cannot be read; the message names it.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (image_size, image_size))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"cannot read the image {path}: {error}") from error
    pixels = torch.from_numpy(np.array(square))
    return pixels.permute(2, 0, 1).float() / 127.5 - 1


class BatchIndices:
    """A rank's endless batches of indices, for a DataLoader's ``batch_sampler``."""

    def __init__(self, shard: np.ndarray, batch_size: int, rank: int, seed: int) -> None:
        self.arguments = shard, batch_size, rank, seed

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in data.batches(*self.arguments))


def network(classes: int) -> nn.Module:
    """Return a network for RGB images of any size from 8 × 8 on.

    Blocks of convolution, batch normalization and pooling, then the mean over the image.
    """
    blocks = [
        layer
        for before, after in pairwise(CHANNELS)
        for layer in (
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
    ]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], classes)
    )


def task(folders: Folders, image_size: int, shards: str, alpha: float | None = None) -> Task:
    """Return a data set of folders as a task.

    Args:
        folders: The data set.
        image_size: Pixels of a side that its images are resized to, at least 8.
        shards: How the training set is divided: see `data.shard`.
        alpha: For "dirichlet" shards.
    """
    model = partial(network, len(folders.classes))
    loaders = partial(batches, folders, image_size, shards, alpha)
    return Task("images", model, loaders, cross_entropy, accuracy)


def batches(
    folders: Folders,
    image_size: int,
    shards: str,
    alpha: float | None,
    rank: int,
    size: int,
    batch_size: int,
    seed: int,
) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Return a rank's batches without end, and those of its part of the test set."""
    shard = data.shard(folders.train.labels, rank, size, shards, seed, alpha)
    train = Pictures(folders.train, image_size)
    part = select(folders.test, np.arange(rank, len(folders.test.paths), size))
    return (
        DataLoader(train, batch_sampler=BatchIndices(shard, batch_size, rank, seed)),
        DataLoader(Pictures(part, image_size), batch_size),
    )
