"""Images as a task, in folders or in files of MNIST or CIFAR: `wagma train --images DIR`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

from wagma import data
from wagma.job import UsageError
from wagma.tasks.arrays import Arrays, Set
from wagma.tasks.classification import Batch, accuracy, cross_entropy
from wagma.tasks.contract import Task
from wagma.tasks.folders import Files, Folders, select
from wagma.tasks.resnet import resnet

WIDTHS = 32, 64, 128  # channels after each block of the small network
FOLDERS_SIZE = 32  # pixels of a side, of images of unequal sizes
BLACK = -1.0


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


class Mapped(Dataset):
    """Images of an array.

    Args:
        images: The images and their labels.
        image_size: Pixels of a side to which they are resized; None: as they are.
    """

    def __init__(self, images: Set, image_size: int | None) -> None:
        self.images, self.image_size = images, image_size

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image in [-1, 1], float32, shape (channels, height, width), and its label."""
        pixels = torch.from_numpy(np.array(self.images.pixels[index])).float() / 127.5 - 1
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
            pixels = functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
        return pixels, int(self.images.labels[index])


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


class Augmented:
    """Makes a batch of a DataLoader's samples, and draws changes of its images.

    Args:
        change: Takes images, float32, shape (n, channels, height, width), and returns changed ones.
    """

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change

    def __call__(self, samples: list[tuple[torch.Tensor, int]]) -> Batch:
        images, labels = default_collate(samples)
        return self.change(images), labels


def augmentation(augment: str, by: str) -> Augmented | None:
    """Return what makes batches of changed images; None: nothing does.

    Args:
        augment: "none", "crop" or "crop-flip".
        by: "own" or "torchvision": whose code draws the changes, which are of one kind.

    Raises:
        UsageError: torchvision cannot be imported.
    """
    if augment == "none":
        return None
    if by == "torchvision":
        transforms()
    change = {"own": cropped_and_mirrored, "torchvision": by_torchvision}[by]
    return Augmented(partial(change, augment == "crop-flip"))


def transforms() -> Any:
    """Return torchvision's transforms.

    Raises:
        UsageError: They cannot be imported.
    """
    try:
        from torchvision import transforms as made
    except (ImportError, RuntimeError) as error:  # such as one made for another version of torch
        raise UsageError(f"argument --augment-with: cannot import torchvision: {error}") from error
    return made


def by_torchvision(flip: bool, images: torch.Tensor) -> torch.Tensor:
    """Return what torchvision's transforms make of each image; see `cropped_and_mirrored`."""
    height, width = images.shape[-2:]
    padding = width // 8, height // 8
    change = transforms().RandomCrop((height, width), padding=padding, fill=BLACK)
    if flip:
        change = transforms().Compose([change, transforms().RandomHorizontalFlip()])
    return torch.stack([change(each) for each in images])


def cropped_and_mirrored(flip: bool, images: torch.Tensor) -> torch.Tensor:
    """Return images that are moved by up to an eighth of a side, and half of them mirrored.

    Args:
        flip: Whether they are mirrored.
        images: float32, shape (n, channels, height, width).
    """
    images = cropped(images)
    if flip:
        mirrored = torch.rand(len(images)) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images


def cropped(images: torch.Tensor) -> torch.Tensor:
    """Return images, each moved by up to an eighth of a side, with black where nothing was."""
    count, channels, height, width = images.shape
    up, left = height // 8, width // 8
    padded = functional.pad(images, (left, left, up, up), value=BLACK)
    rows = torch.randint(2 * up + 1, (count, 1)) + torch.arange(height)
    columns = torch.randint(2 * left + 1, (count, 1)) + torch.arange(width)
    each, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[each, channel, rows[:, None, :, None], columns[:, None, None, :]]


def network(classes: int, channels: int = 3) -> nn.Module:
    """Return a network for images of any size from 8 × 8 on.

    Blocks of convolution, batch normalization and pooling, then the mean over the image.
    """
    blocks = [
        layer
        for before, after in pairwise((channels, *WIDTHS))
        for layer in (
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
    ]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes)
    )


def task(
    found: Folders | Arrays,
    image_size: int | None,
    shards: str,
    alpha: float | None = None,
    model: str = "cnn",
    augment: str = "none",
    augment_with: str = "own",
) -> Task:
    """Return a data set as a task.

    Args:
        found: The data set.
        image_size: Pixels of a side that its images are resized to, at least 8; None: those of
            arrays as they are, and of folders to `FOLDERS_SIZE`.
        shards: How the training set is divided: see `data.shard`.
        alpha: For "dirichlet" shards.
        model: "cnn", or one of `resnet.DEPTHS`.
        augment, augment_with: How training images are changed at random: see `augmentation`.
    """
    if isinstance(found, Arrays):
        classes, channels = found.classes, found.train.pixels.shape[1]
    else:
        classes, channels = len(found.classes), 3
    if model == "cnn":
        made = partial(network, classes, channels)
    else:
        made = partial(resnet, model, channels, classes)
    changed = augmentation(augment, augment_with)
    loaders = partial(batches, found, image_size, shards, alpha, changed)
    return Task("images", made, loaders, cross_entropy, accuracy)


def batches(
    found: Folders | Arrays,
    image_size: int | None,
    shards: str,
    alpha: float | None,
    changed: Augmented | None,
    rank: int,
    size: int,
    batch_size: int,
    seed: int,
) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Return a rank's batches without end, and those of its part of the test set."""
    shard = data.shard(found.train.labels, rank, size, shards, seed, alpha)
    part = np.arange(rank, len(found.test.labels), size)
    train, test = pictures(found, part, image_size)
    drawn = data.Batches(shard, batch_size, rank, seed, np.ndarray.tolist)
    return (
        DataLoader(train, batch_sampler=drawn, collate_fn=changed),
        DataLoader(test, batch_size),
    )


def pictures(
    found: Folders | Arrays, part: np.ndarray, image_size: int | None
) -> tuple[Dataset, Dataset]:
    """Return the training images, and a part of the test images."""
    if isinstance(found, Arrays):
        test = Set(found.test.pixels[part], found.test.labels[part])
        return Mapped(found.train, image_size), Mapped(test, image_size)
    side = image_size or FOLDERS_SIZE
    return Pictures(found.train, side), Pictures(select(found.test, part), side)
