"""Samples from files in the format of libsvm, as scikit-learn reads them."""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from wagma.job import UsageError
from wagma.wpsgd.methods import TEST_SAMPLES
from wagma.wpsgd.samples import Samples, of_matrix

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

OPENERS = {".gz": gzip.open, ".bz2": bz2.open}
SHOWN = 40  # characters of a line that is quoted
MOST_FEATURES = 1 << 27  # of a model whose size only a file says: 1 GiB; KDD Cup 2012 has 5.5 · 10⁷


def read(path: Path, features: int | None = None) -> Samples:
    """Return a file's samples; see `read_all`."""
    return read_all([path], features)[0]


def read_all(paths: Sequence[Path], features: int | None = None) -> list[Samples]:
    """Return the samples of files for one model, whose labels are 0 and 1, or −1 and 1.

    Features are counted from 1, or from 0 if any of the files has a feature 0.

    Args:
        paths: files of lines such as "1 3:0.5 17:1", also compressed (.gz, .bz2). A "qid:" is
            ignored. The first is to train on, so it must have samples of both classes.
        features: the model's number of features; None: as many as the first file has.

    Raises:
        UsageError: a file cannot be read, a line is malformed, a label is invalid, samples have
            features that the model lacks, or `features` is None and a feature's number is so large
            that the model would have more than 1 GiB.
    """
    loaded = [load(path) for path in paths]
    base = 0 if any((matrix.indices == 0).any() for matrix, _ in loaded) else 1
    features = features or modest(paths[0], loaded[0][0], base)
    label = loaded[0][1][0]
    found = [convert(path, *each, base, features) for path, each in zip(paths, loaded)]
    if (found[0].labels == found[0].labels[0]).all():
        raise UsageError(f"{paths[0]} has only one class: all labels are {label:g}")
    return found


def load(path: Path) -> tuple[csr_matrix, np.ndarray]:
    """Return a file's matrix, whose column i is feature i, and its labels."""
    from sklearn.datasets import load_svmlight_file  # not at the top: data may be generated

    try:
        try:
            matrix, labels = load_svmlight_file(str(path), zero_based=True)
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{path}, {malformed(path)}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not len(labels):
        raise UsageError(f"{path} has no samples")
    if not matrix.nnz:
        raise UsageError(f"{path} has no features")
    return matrix.tocsr(), labels


def modest(path: Path, matrix: csr_matrix, base: int) -> int:
    """Return the number of a file's features, if it is not far beyond any data set's."""
    features = matrix.shape[1] - base
    if features > MOST_FEATURES:
        largest = matrix.indices.max()
        size = f"{8 * features / 2**30:.3g} GiB"
        reason = f"feature {largest} would make a model of {size}"
        row = row_of(matrix, matrix.indices == largest)
        refuse(path, row, f"{reason}; if it is meant, give --features {features}")
    return features


def convert(path: Path, matrix, labels: np.ndarray, base: int, features: int) -> Samples:
    """Return a file's matrix and labels as samples; its features are counted from `base`."""
    classes = (-1.0, 1.0) if (labels == -1).any() else (0.0, 1.0)
    wrong = np.flatnonzero(~np.isin(labels, classes))
    if wrong.size:
        refuse(path, wrong[0], f"label {labels[wrong[0]]:g}, but classes are 0 and 1, or -1 and 1")
    if not np.isfinite(matrix.data).all():
        refuse(path, row_of(matrix, ~np.isfinite(matrix.data)), "a value is not finite")
    if matrix.shape[1] - base > features:
        row = row_of(matrix, matrix.indices >= features + base)
        refuse(path, row, f"more features than the model's {features:,}")
    matrix.indices -= base  # in place: KDD 2010 has 0.3 · 10⁹ of them
    parts = matrix.data, matrix.indices, matrix.indptr
    matrix = type(matrix)(parts, (len(labels), features), copy=False)
    return of_matrix(matrix, np.where(labels > 0, 1.0, -1.0))


def split(samples: Samples, seed: int) -> tuple[Samples, Samples]:
    """Return the training samples, and 1,000 random test samples or a fifth if that is less.

    Raises:
        UsageError: there are too few samples for both.
    """
    count = min(TEST_SAMPLES, len(samples) // 5)
    if count == 0:
        raise UsageError(
            f"{len(samples)} samples are too few to train on some and to test on others"
        )
    order = np.random.default_rng([seed, len(samples)]).permutation(len(samples))
    return samples.take(np.sort(order[count:])), samples.take(np.sort(order[:count]))


def malformed(path: Path) -> str:
    """Return a description of the line that the reader rejects, found by bisection."""
    from sklearn.datasets import load_svmlight_file

    def error(part: list[bytes]) -> str:
        try:
            load_svmlight_file(io.BytesIO(b"".join(part)), zero_based=True)
        except (ValueError, OverflowError) as error:
            return str(error)
        return ""

    found = list(lines(path))
    first, last = 0, len(found)  # the line is among these
    while last - first > 1:
        middle = (first + last) // 2
        if error(found[first:middle]):
            last = middle
        else:
            first = middle
    text = found[first].decode(errors="replace").strip()[:SHOWN]
    reason = " (features must ascend)" if "sorted" in error(found[first:last]) else ""
    return f"line {first + 1} is malformed: {text!r}{reason}"


def refuse(path: Path, row: int, reason: str) -> NoReturn:
    """Raise UsageError for a sample."""
    raise UsageError(f"{path}, line {line_of(path, row)}: {reason}")


def row_of(matrix, where: np.ndarray) -> int:
    """Return the row of the first of a matrix's values for which `where` is true."""
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
