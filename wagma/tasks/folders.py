"""Folders of images in torchvision's layout: one folder for each class.

This module decodes no images and does not load torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from wagma.job import UsageError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = 0.2
SPLIT_SEED = 1797


class Files(NamedTuple):
    """Image files and their labels.

    Args:
        paths: Their paths.
        labels: Each one's index in the list of classes, int64, shape (len(paths),).
    """

    paths: list[Path]
    labels: np.ndarray


class Folders(NamedTuple):
    """A data set.

    Args:
        classes: Their names, sorted.
        train: The training files.
        test: The test files; no file is in both.
    """

    classes: list[str]
    train: Files
    test: Files


def scan(directory: Path) -> Folders:
    """Return the files in DIR/train/CLASS/ and DIR/test/CLASS/ (or DIR/val/CLASS/).

    Without a test folder, a fifth of each class is held out, always the same one. Without a
    training folder either, the classes are DIR/CLASS/.

    Raises:
        UsageError: There are no images, fewer than two classes, or different classes in the two.
    """
    train_folder, test_folders = directory / "train", [directory / "test", directory / "val"]
    test_folder = next((folder for folder in test_folders if folder.is_dir()), None)
    if not train_folder.is_dir():
        if test_folder:
            raise UsageError(f"{directory} has a folder {test_folder.name}, but none named train")
        train_folder = directory
    classes, train = read(train_folder)
    if len(classes) < 2:
        raise UsageError(
            f"{train_folder} needs at least two folders of images, one for each class: it has "
            f"{len(classes)}"
        )
    if test_folder is None:
        return Folders(classes, *hold_out(train))
    test_classes, test = read(test_folder)
    if test_classes != classes:
        differing = ", ".join(sorted(set(classes) ^ set(test_classes)))
        raise UsageError(
            f"{train_folder} and {test_folder} have different classes: {differing} in one only"
        )
    return Folders(classes, train, test)


def read(folder: Path) -> tuple[list[str], Files]:
    """Return a folder's classes and all images below them, in a fixed order."""
    try:
        names = sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError as error:
        raise UsageError(f"cannot read the folder {folder}: {error.strerror}") from error
    paths, labels = [], []
    for label, name in enumerate(names):
        found = sorted(
            path
            for path in (folder / name).rglob("*")
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        )
        if not found:
            raise UsageError(f"{folder / name} has no images ({', '.join(SUFFIXES)})")
        paths += found
        labels += [label] * len(found)
    return names, Files(paths, np.array(labels, dtype=np.int64))


def hold_out(files: Files) -> tuple[Files, Files]:
    """Return a data set's training files and its test files, a fifth of each class.

    A class of one image is used for training only.
    """
    generator = np.random.default_rng(SPLIT_SEED)
    tested = np.zeros(len(files.labels), dtype=bool)
    for label in np.unique(files.labels):
        members = generator.permutation(np.flatnonzero(files.labels == label))
        if len(members) > 1:
            tested[members[: max(1, int(HELD_OUT * len(members)))]] = True
    return select(files, np.flatnonzero(~tested)), select(files, np.flatnonzero(tested))


def select(files: Files, indices: np.ndarray) -> Files:
    """Return some of the files."""
    return Files([files.paths[index] for index in indices], files.labels[indices])
