"""Samples of two classes with sparse features: generated, or read, and divided among nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

POPULARITY = 1.0  # exponent of the power law of the features' frequencies
LEANING = 0.5  # share of features of the other class that are drawn again
NOISE = 0.02  # share of generated labels that are wrong


@dataclass(frozen=True)
class Samples:
    """Rows of a CSR matrix, and the class of each.

    Attributes:
        indptr, indices, data: int64, int32 and float64 arrays; a row's indices ascend.
        labels: float64 array of shape (rows,), of −1 and 1.
        features: number of columns.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    labels: np.ndarray
    features: int

    def __post_init__(self) -> None:
        if self.indices.size and not 0 <= self.indices.min() <= self.indices.max() < self.features:
            raise ValueError(
                f"indices range from {self.indices.min()} to {self.indices.max()}, but must be at "
                f"least 0 and below {self.features}, the number of features"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def matrix(self) -> csr_matrix:
        """The rows as a scipy matrix, without a copy."""
        from scipy.sparse import csr_matrix  # not at the top: the package does not need it

        shape = len(self), self.features
        return csr_matrix((self.data, self.indices, self.indptr), shape, copy=False)

    def take(self, rows: np.ndarray) -> Samples:
        """Return these rows, in this order."""
        return of_matrix(self.matrix[rows], self.labels[rows])

    def largest_square(self) -> float:
        """Return β²_max, the largest ‖x‖²; 0 without rows."""
        squares = self.matrix.multiply(self.matrix).sum(axis=1)
        return float(squares.max()) if len(self) else 0.0

    def objective(self, model: np.ndarray, regularization: float, logistic: bool = False) -> float:
        """Return λ/2·‖w‖² plus the mean loss of these rows.

        Args:
            model: w, float64 array of shape (features,).
            regularization: λ.
            logistic: as for `Steps`.

        Source: WP-SGD, Equation 4.
        """
        margins = self.labels * (self.matrix @ model)
        losses = np.logaddexp(0, -margins) if logistic else np.maximum(0, 1 - margins)
        return float(regularization / 2 * (model @ model) + losses.mean())


def of_matrix(matrix, labels: np.ndarray) -> Samples:
    """Return the rows of a scipy matrix as `Samples`; the labels are −1 and 1."""
    matrix = matrix.tocsr()
    matrix.sort_indices()
    return Samples(
        matrix.indptr.astype(np.int64, copy=False),
        matrix.indices.astype(np.int32, copy=False),
        matrix.data.astype(np.float64, copy=False),
        np.asarray(labels, np.float64),
        matrix.shape[1],
    )


def generate(rows: int, features: int, nonzeros: int, seed: int) -> Samples:
    """Return samples like those of texts, in which few features are frequent.

    A row has the features that `nonzeros` draws give, weighted by how often each is drawn, and is
    normalized to length 1. A feature's probability follows a power law, and is higher in rows of
    one class than in those of the other.

    Args:
        rows, features: number of rows and of features.
        nonzeros: number of features drawn for a row, of which some may be the same.
        seed: seed of all draws.
    """
    generator = np.random.default_rng([seed, rows, features])
    labels = generator.choice([-1.0, 1.0], rows)
    popularity = np.cumsum(np.arange(1, features + 1) ** -POPULARITY)
    places = generator.random((2, rows, nonzeros)) * popularity[-1]
    first, second = np.searchsorted(popularity, places).clip(max=features - 1)
    leaning = generator.choice([-1.0, 1.0], features)
    unlike = leaning[first] != labels[:, None]
    drawn = np.where(unlike & (generator.random(first.shape) < LEANING), second, first)
    drawn = np.sort(generator.permutation(features)[drawn], axis=1)
    new = np.ones_like(drawn, bool)
    new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    counts = np.diff(np.append(np.flatnonzero(new), drawn.size)).astype(np.float64)
    indptr = np.append(0, np.cumsum(new.sum(axis=1)))
    lengths = np.sqrt(np.add.reduceat(counts**2, indptr[:-1]))
    data = counts / np.repeat(lengths, np.diff(indptr))
    wrong = generator.random(rows) < NOISE
    return Samples(
        indptr, drawn[new].astype(np.int32), data, np.where(wrong, -labels, labels), features
    )


def shards(rows: int, nodes: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Return each node's rows: random parts whose sizes differ by at most one."""
    order = generator.permutation(rows)
    return [order[node::nodes] for node in range(nodes)]


def epochs(rows: np.ndarray, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield a node's rows in random order, epoch after epoch."""
    while True:
        yield generator.permutation(rows)


class Order:
    """The order in which a node consumes its rows, shuffled in every epoch.

    Args:
        rows: int64 array, not empty.
        seed: seed of a numpy generator.
    """

    def __init__(self, rows: np.ndarray, seed) -> None:
        self._epochs = epochs(np.asarray(rows, np.int64), np.random.default_rng(seed))
        self._left = next(self._epochs)

    def peek(self, count: int) -> np.ndarray:
        """Return the next rows without consuming them: int64 array of shape (count,)."""
        while len(self._left) < count:
            self._left = np.concatenate([self._left, next(self._epochs)])
        return self._left[:count]

    def take(self, count: int) -> np.ndarray:
        """Return and consume the next rows: int64 array of shape (count,)."""
        taken = self.peek(count)
        self._left = self._left[count:]
        return taken
