"""Scikit-learn's handwritten digits, held-out test set, shards and batches.

All of it is a pure function of its arguments: the test set is the same for every number of ranks
and every seed, and the shards of all ranks together are the training set, each image once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TRAIN_IMAGES, TEST_IMAGES = 1437, 360
SPLIT_SEED = 1797
SHARDS_STREAM, BATCHES_STREAM, DIRICHLET_STREAM, DEALING_STREAM = 1, 2, 5, 6
LEAST = 10  # fewest images of a rank with a "dirichlet" shard


class Images(NamedTuple):
    """Images, float32 in [0, 1], shape (n, 1, 8, 8), and their labels 0 to 9, int64, shape (n,)."""

    images: np.ndarray
    labels: np.ndarray


def load_digits() -> tuple[Images, Images]:
    """Return the 1,437 images to train on and the 360 to test on; nothing is downloaded."""
    pixels, labels = read_digits()
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Images(images[train], labels[train]), Images(images[test], labels[test])


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's pixels, 0 to 16, shape (1797, 64), and its labels, shape (1797,).

    They are read from its file if that is found: importing scikit-learn takes longer than importing
    torch.
    """
    if (found := importlib.util.find_spec("sklearn")) and found.origin:
        file = Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz"
        if file.exists():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn import datasets

    return datasets.load_digits(return_X_y=True)


def shard(
    labels: np.ndarray, rank: int, size: int, kind: str, seed: int, alpha: float | None = None
) -> np.ndarray:
    """Return the indices of the images that a rank trains on.

    Args:
        labels: The labels of the whole training set, shape (n,).
        rank: This rank, 0 to size - 1.
        size: The number of ranks, at most n.
        kind: "iid" deals out the shuffled images; "label-sorted" gives each rank a contiguous part
            of the images sorted by label, so that a rank sees few of the ten digits; "dirichlet"
            divides each label's images in separately drawn proportions.
        seed: The job's seed.
        alpha: For "dirichlet", the concentration: the smaller, the more the shards differ.
    """
    if size > len(labels):
        raise ValueError(f"{len(labels)} training images cannot be divided among {size} ranks")
    shuffled = np.random.default_rng([seed, SHARDS_STREAM]).permutation(len(labels))
    if kind == "iid":
        return shuffled[rank::size]
    if kind == "label-sorted":
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        return np.array_split(by_label, size)[rank]
    if kind == "dirichlet":
        return dirichlet(labels, shuffled, size, seed, alpha)[rank]
    raise ValueError(f"shards are 'iid', 'label-sorted' or 'dirichlet', not {kind!r}")


def dirichlet(
    labels: np.ndarray, shuffled: np.ndarray, size: int, seed: int, alpha: float
) -> list[np.ndarray]:
    """Return every rank's shard if each label's images are divided by a Dirichlet draw.

    A rank that would have fewer than `LEAST` images, or than an even share if that is less, gets
    the missing ones from the largest shard. Otherwise this is the division of Hsu, Qi and Brown,
    Measuring the effects of non-identical data distribution, 2019, as Li et al. draw it (ICDE
    2022, "distribution-based label imbalance"), who draw again in that case.

    Args:
        labels, size, seed, alpha: As for `shard`.
        shuffled: All indices in random order.
    """
    generator = np.random.default_rng([seed, DIRICHLET_STREAM])
    shards = [np.empty(0, dtype=shuffled.dtype)] * size
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        ends = np.cumsum(generator.dirichlet(np.full(size, alpha)))[:-1]
        parts = np.split(members, np.round(ends * len(members)).astype(int))
        shards = [np.concatenate(pair) for pair in zip(shards, parts)]
    least = min(LEAST, len(labels) // size)
    for rank in range(size):
        while (lacking := least - len(shards[rank])) > 0:
            largest = max(range(size), key=lambda each: len(shards[each]))
            moved = min(lacking, len(shards[largest]) - least)
            given, shards[largest] = np.split(generator.permutation(shards[largest]), [moved])
            shards[rank] = np.concatenate([shards[rank], given])
    return shards


class Batches:
    """A rank's batches without end, of indices of its samples, or what is fetched for them.

    The shard is shuffled anew for every pass over it, and a batch may straddle two passes.

    Args:
        shard: The indices of the rank's samples.
        batch_size: Indices in a batch.
        rank, seed: This rank, and the job's seed.
        fetch: Takes a batch's indices, and returns what is yielded for them.
    """

    def __init__(
        self,
        shard: np.ndarray,
        batch_size: int,
        rank: int,
        seed: int,
        fetch: Callable[[np.ndarray], Any] = np.asarray,
    ) -> None:
        self._shard, self._batch_size, self._seed = shard, batch_size, seed
        self._fetch = fetch
        self._generator = np.random.default_rng([seed, BATCHES_STREAM, rank])
        self._pending = np.empty(0, dtype=shard.dtype)  # the rest of the pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while len(self._pending) < self._batch_size:
            drawn = self._generator.permutation(self._shard)
            self._pending = np.concatenate([self._pending, drawn])
        batch, self._pending = np.split(self._pending, [self._batch_size])
        return self._fetch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the rest of the pass, and the generator of the next ones."""
        return {"pending": self._pending, "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, which this rank had with the same shard."""
        self._pending = np.asarray(state["pending"], dtype=self._shard.dtype)
        self._generator.bit_generator.state = state["generator"]

    def deal(self, states: list[dict[str, Any]], rank: int, size: int) -> None:
        """Begin with this rank's part of what other ranks have not drawn in their passes.

        Args:
            states: The positions of all ranks that shared the samples until now.
            rank, size: This rank, and the number of those that share the rest.
        """
        rest = np.concatenate([np.asarray(each["pending"]) for each in states])
        generator = np.random.default_rng([self._seed, DEALING_STREAM, len(rest)])
        self._pending = generator.permutation(np.sort(rest))[rank::size].astype(self._shard.dtype)
