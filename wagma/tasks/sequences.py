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
    """A rank's batches of sequences of similar length, without end.

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
        self._fetch = fetch
        self._lengths, self._batch_size, self._by_tokens = lengths, batch_size, by_tokens
        self._generator = np.random.default_rng([seed, ORDER_STREAM, rank])
        pool = batch_size * max(1, min(POOL, len(shard) // batch_size))
        self._pools = data.Batches(shard, pool, rank, seed)
        self._pending: list[np.ndarray] = []  # the rest of a pool's batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return what is fetched for the next batch."""
        if not self._pending:
            drawn = next(self._pools)
            batches = self._cut(drawn[np.argsort(self._lengths[drawn], kind="stable")])
            self._pending = [batches[place] for place in self._generator.permutation(len(batches))]
        return self._fetch(self._pending.pop(0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: batches to come, sequences of the pass, and both generators."""
        return {
            "pending": np.concatenate([np.empty(0, dtype=np.int64), *self._pending]),
            "ends": np.cumsum([len(batch) for batch in self._pending]),
            "pools": self._pools.state_dict(),
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, which this rank had with the same shard."""
        ends = np.asarray(state["ends"]).astype(int)
        self._pending = np.split(np.asarray(state["pending"]), ends)[:-1]
        self._pools.load_state_dict(state["pools"])
        self._generator.bit_generator.state = state["generator"]

    def deal(self, states: list[dict[str, Any]], rank: int, size: int) -> None:
        """Begin with this rank's part of what other ranks have not drawn in their passes.

        Args:
            states: The positions of all ranks that shared the sequences until now.
            rank, size: This rank, and the number of those that share the rest.
        """
        rests = [np.concatenate([each["pending"], each["pools"]["pending"]]) for each in states]
        self._pools.deal([{"pending": rest} for rest in rests], rank, size)
        self._pending = []

    def _cut(self, ordered: np.ndarray) -> list[np.ndarray]:
        """Cut sequences, shortest first, into batches."""
        if not self._by_tokens:
            return np.split(ordered, range(self._batch_size, len(ordered), self._batch_size))
        most = self._batch_size * self._lengths.mean()
        starts = [0]
        for index, length in enumerate(self._lengths[ordered]):
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
