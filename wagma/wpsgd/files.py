"""Samples from files in the format of libsvm, as scikit-learn reads them."""

from __future__ import annotations

import bz2
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from wagma.job import UsageError
from wagma.wpsgd.methods import TEST_SAMPLES
from wagma.wpsgd.samples import Samples, of_matrix

OPENERS = {".gz": gzip.open, ".bz2": bz2.open}
SHOWN = 40  # characters of a line that is quoted


def read(path: Path, features: int | None = None) -> Samples:
    """Return a file's samples, of which labels are 0 and 1, or −1 and 1.

    Args:
        path: of lines such as "1 3:0.5 17:1", also compressed (.gz, .bz2).
        features: how many a model has; None: as many as the file.

    Raises:
        UsageError: the file cannot be read, a line is malformed, a label is of no class, or
            samples have other features than the model.
    """
    from sklearn.datasets import load_svmlight_file  # not at the top: data may be generated

    try:
        matrix, labels = load_svmlight_file(str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path}, {malformed(path)}") from error
    if not len(labels):
        raise UsageError(f"{path} has no samples")
    classes = (-1.0, 1.0) if (labels == -1).any() else (0.0, 1.0)
    wrong = np.flatnonzero(~np.isin(labels, classes))
    if wrong.size:
        refuse(path, wrong[0], f"label {labels[wrong[0]]:g}, but classes are 0 and 1, or -1 and 1")
    if (labels == labels[0]).all():
        raise UsageError(f"{path} has one class only: all labels are {labels[0]:g}")
    matrix = matrix.tocsr()
    if not np.isfinite(matrix.data).all():
        refuse(path, row_of(matrix, ~np.isfinite(matrix.data)), "a value is not finite")
    if features is not None:
        if matrix.shape[1] > features:
            row = row_of(matrix, matrix.indices >= features)
            refuse(path, row, f"more features than the model's {features:,}")
        matrix.resize(matrix.shape[0], features)
    return of_matrix(matrix, np.where(labels > 0, 1.0, -1.0))


def split(samples: Samples, seed: int) -> tuple[Samples, Samples]:
    """Return what to train on, and 1,000 random samples to test with, or a fifth of fewer.

    Raises:
        UsageError: there are too few for both.
    """
    count = min(TEST_SAMPLES, len(samples) // 5)
    if count == 0:
        raise UsageError(
            f"{len(samples)} samples are too few to train on some and test with others"
        )
    order = np.random.default_rng([seed, len(samples)]).permutation(len(samples))
    return samples.take(np.sort(order[count:])), samples.take(np.sort(order[:count]))


def malformed(path: Path) -> str:
    """Return which line the reader does not understand, found by halving what it is given."""
    from sklearn.datasets import load_svmlight_file

    def fails(part: list[bytes]) -> bool:
        try:
            load_svmlight_file(io.BytesIO(b"".join(part)))
        except (ValueError, OverflowError):
            return True
        return False

    found = list(lines(path))
    first, last = 0, len(found)  # the line is among these
    while last - first > 1:
        middle = (first + last) // 2
        if fails(found[first:middle]):
            last = middle
        else:
            first = middle
    text = found[first].decode(errors="replace").strip()[:SHOWN]
    return f"line {first + 1} is malformed: {text!r}"


def refuse(path: Path, row: int, reason: str) -> NoReturn:
    """Raise UsageError for a sample."""
    raise UsageError(f"{path}, line {line_of(path, row)}: {reason}")


def row_of(matrix, where: np.ndarray) -> int:
    """Return the row of the first of a matrix's values for which this is so."""
    return int(np.searchsorted(matrix.indptr, np.argmax(where), side="right")) - 1


def line_of(path: Path, row: int) -> int:
    """Return the number of a sample's line, counted from 1."""
    numbers = (
        number for number, line in enumerate(lines(path), 1) if line.partition(b"#")[0].strip()
    )
    return next(number for place, number in enumerate(numbers) if place == row)


def lines(path: Path) -> Iterator[bytes]:
    """Yield a file's lines."""
    with OPENERS.get(path.suffix, open)(path, "rb") as file:
        yield from file
