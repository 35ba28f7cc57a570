"""Images in the files of MNIST (idx) and of CIFAR (its binary version).

Neither is a pickle: reading them runs no code. This module does not load torch.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wagma import data
from wagma.job import UsageError

IDX = ("train-images", "train-labels", "t10k-images", "t10k-labels")
UNSIGNED = 8  # idx's number for the type of bytes
PIXELS = (3, 32, 32)  # of CIFAR
# By number of classes: the training files, the test file, and the bytes of labels before an image,
# of which the last is used.
CIFAR = {
    10: ([f"data_batch_{number}.bin" for number in range(1, 6)], "test_batch.bin", 1),
    100: (["train.bin"], "test.bin", 2),
}


class Set(NamedTuple):
    """Images and their labels.

    Args:
        pixels: uint8, shape (n, channels, height, width).
        labels: int64, shape (n,).
    """

    pixels: np.ndarray
    labels: np.ndarray


class Arrays(NamedTuple):
    """A data set.

    Args:
        classes: Their number.
        train: What is trained on.
        test: What is not.
    """

    classes: int
    train: Set
    test: Set


def are_in(directory: Path) -> bool:
    """Return whether a folder has images in such files.

    Raises:
        UsageError: It has CIFAR's Python version.
    """
    if any((directory / name).is_file() for name in ("batches.meta", "meta")):
        raise UsageError(
            f"argument --images: {directory} has CIFAR's Python version, whose files may run any "
            "code: use its binary version"
        )
    firsts = (directory / train[0] for train, _, _ in CIFAR.values())
    return idx_file(directory, IDX[0]) is not None or any(each.exists() for each in firsts)


def read(directory: Path) -> Arrays:
    """Return the images of such files.

    Uncompressed files are mapped, so that the ranks of a node share their pages.

    Raises:
        UsageError: A file is missing, cannot be read, or has another format.
    """
    try:
        for classes, (train, test, labels) in CIFAR.items():
            if (directory / train[0]).exists():
                files = [directory / name for name in train], [directory / test]
                return Arrays(classes, *(read_cifar(each, labels, classes) for each in files))
        return read_idx(directory)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"argument --images: {error}") from error


def digits() -> Arrays:
    """Return scikit-learn's digits."""
    return Arrays(
        10,
        *(
            Set(np.round(255 * each.images).astype(np.uint8), each.labels)
            for each in data.load_digits()
        ),
    )


def idx_file(directory: Path, name: str) -> Path | None:
    """Return the file of MNIST with this name, which may be compressed; None without it."""
    rank = 3 if name.endswith("images") else 1
    endings = (f"{dot}idx{rank}-ubyte{packed}" for packed in ("", ".gz") for dot in "-.")
    paths = (directory / f"{name}{ending}" for ending in endings)
    return next((path for path in paths if path.exists()), None)


def read_idx(directory: Path) -> Arrays:
    """Return the four files of MNIST, or of others in its format."""
    found = []
    for name in IDX:
        path = idx_file(directory, name)
        if path is None:
            raise UsageError(f"argument --images: {directory} has no {name} in idx format")
        found.append(read_idx_file(path, 3 if name.endswith("images") else 1))
    sets = []
    for pixels, labels in (found[:2], found[2:]):
        if len(pixels) != len(labels) or not len(labels):
            raise UsageError(
                f"argument --images: {directory} has {len(pixels)} images with {len(labels)} labels"
            )
        sets.append(Set(pixels[:, None], labels.astype(np.int64)))
    return Arrays(1 + int(max(each.labels.max() for each in sets)), *sets)


def read_idx_file(path: Path, dimensions: int) -> np.ndarray:
    """Return a file's array of bytes with so many dimensions.

    Raises:
        UsageError: It has another format.
    """
    wrong = UsageError(f"argument --images: {path} is no idx file of {dimensions}-D bytes")
    if path.suffix == ".gz":
        content = np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8)
    else:
        if not path.stat().st_size:
            raise wrong
        content = np.memmap(path, dtype=np.uint8, mode="r")
    start = 4 * (1 + dimensions)
    if bytes(content[:4]) != bytes([0, 0, UNSIGNED, dimensions]) or len(content) < start:
        raise wrong
    shape = [int(each) for each in content[4:start].view(">i4")]
    if min(shape) < 0 or len(content) != start + math.prod(shape):
        raise wrong
    return content[start:].reshape(shape)


def read_cifar(files: list[Path], labels: int, classes: int) -> Set:
    """Return the images of CIFAR's binary files.

    Args:
        files: The files, whose images are put together.
        labels: Bytes of labels before each image.
        classes: The number of classes.

    Raises:
        UsageError: One has another format, or labels of other classes.
    """
    row = np.dtype([("labels", np.uint8, (labels,)), ("pixels", np.uint8, PIXELS)])
    parts = []
    for path in files:
        size = path.stat().st_size
        if size == 0 or size % row.itemsize:
            raise UsageError(
                f"argument --images: {path} has {size} bytes, not rows of {row.itemsize}"
            )
        parts.append(np.memmap(path, dtype=row, mode="r"))
        if (most := parts[-1]["labels"][:, -1].max()) >= classes:
            raise UsageError(f"argument --images: {path} has the label {most} of {classes} classes")
    pixels = parts[0]["pixels"] if len(parts) == 1 else np.concatenate([p["pixels"] for p in parts])
    return Set(pixels, np.concatenate([each["labels"][:, -1] for each in parts]).astype(np.int64))
