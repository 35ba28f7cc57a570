"""Sequences of tokens: batches of about equal length, and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from wagma import data

POOL = 32  # batches that are drawn together and sorted by length
ORDER_STREAM = 7
IGNORED = -100  # a target that has no loss, as torch's cross entropy has it


class LengthBatches:
    """A rank's batches of sequences of similar length, without end; each iteration is the same.

    As in the buckets of translation systems, sequences are drawn at random, many batches at once,
    and sorted by length within these. Batches of one rank differ in length, and so do those that
    two ranks have at the same time.

    Args:
        lengths: Of all sequences, int64, shape (n,).
        shard: Indices of this rank's, int64, shape (m,).
        batch_size: Sequences of a batch.
        by_tokens: Whether a batch has as many tokens, with padding, as ``batch_size`` sequences of
            mean length, in place of ``batch_size`` sequences.
        rank: This rank.
        seed: The job's seed.
        fetch: Takes a batch's indices, int64, shape (sequences,), and returns what is yielded.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        shard: np.ndarray,
        batch_size: int,
        by_tokens: bool,
        rank: int,
        seed: int,
        fetch: Callable[[np.ndarray], Any] = np.asarray,
    ) -> None:
        self.fetch = fetch
        self.lengths, self.shard, self.batch_size = lengths, shard, batch_size
        self.by_tokens, self.rank, self.seed = by_tokens, rank, seed

    def __iter__(self) -> Iterator[Any]:
        """Yield what is fetched for each batch."""
        generator = np.random.default_rng([self.seed, ORDER_STREAM, self.rank])
        pool = self.batch_size * max(1, min(POOL, len(self.shard) // self.batch_size))
        for drawn in data.Batches(self.shard, pool, self.rank, self.seed):
            batches = self._cut(drawn[np.argsort(self.lengths[drawn], kind="stable")])
            for place in generator.permutation(len(batches)):
                yield self.fetch(batches[place])

    def _cut(self, ordered: np.ndarray) -> list[np.ndarray]:
        """Cut sequences, shortest first, into batches."""
        if not self.by_tokens:
            return np.split(ordered, range(self.batch_size, len(ordered), self.batch_size))
        most = self.batch_size * self.lengths.mean()
        starts = [0]
        for index, length in enumerate(self.lengths[ordered]):
            if index > starts[-1] and (index + 1 - starts[-1]) * length > most:
                starts.append(index)
        return np.split(ordered, starts[1:])


def padded(sequences: Sequence[np.ndarray], padding: int) -> torch.Tensor:
    """Return sequences as one array, int64, shape (sequences, length of the longest)."""
    longest = max(map(len, sequences))
    rows = np.full((len(sequences), longest), padding, dtype=np.int64)
    for row, sequence in zip(rows, sequences):
        row[: len(sequence)] = sequence
    return torch.from_numpy(rows)
