"""A small GPT on the bytes of text: `wagma train --task language`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from wagma import data
from wagma.job import UsageError
from wagma.tasks.contract import Task
from wagma.tasks.sequences import IGNORED, LengthBatches, padded

END = 256  # the token after the bytes' 256: before each sequence, and after it
WIDTH, HEADS, LAYERS = 64, 4, 2
HELD_OUT = 10  # each tenth sequence of a file is not trained on
VALIDATED = 200  # sequences at most that a model is evaluated on
PARAGRAPH = re.compile(rb"\r?\n[ \t\r]*\n\s*")
Batch = tuple[torch.Tensor, torch.Tensor]


class Corpus(NamedTuple):
    """Sequences of bytes.

    Args:
        sequences: Each is uint8, of shape (its length,).
        labels: The number of the file that each is of, int64, shape (len(sequences),).
    """

    sequences: list[np.ndarray]
    labels: np.ndarray

    def select(self, indices: np.ndarray) -> Corpus:
        """Return some of the sequences."""
        return Corpus([self.sequences[index] for index in indices], self.labels[indices])


class GPT(nn.Module):
    """Logits of each next byte, shape (batch, length, 257), of tokens of shape (batch, length).

    Args:
        length: The longest sequence's.
        layers: Of the Transformer.
    """

    def __init__(self, length: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.token = nn.Embedding(END + 1, WIDTH)
        self.position = nn.Embedding(length, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, END + 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        inputs = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.blocks(inputs, mask, is_causal=True))


def read(files: list[Path] | None, length: int, packing: bool) -> tuple[Corpus, Corpus]:
    """Return the training sequences of text files, and those that are held out.

    Args:
        files: The files; None: the help topics that Python ships, each as a file.
        length: The longest sequence's, in bytes.
        packing: Whether files are cut into sequences of this length. Otherwise a sequence is a
            paragraph, of which blank lines are the ends, or a part of a long one.

    Raises:
        UsageError: A file cannot be read, or all are too short.
    """
    sequences: list[np.ndarray] = []
    labels: list[int] = []
    for label, text in enumerate(texts(files)):
        parts = [text.strip()] if packing else PARAGRAPH.split(text.strip())
        found = [part[at : at + length] for part in parts for at in range(0, len(part), length)]
        if packing:
            found = [each for each in found if len(each) == length]
        sequences += [np.frombuffer(each, dtype=np.uint8) for each in found]
        labels += [label] * len(found)
    if len(sequences) < 2 * HELD_OUT:
        of = f"{length} bytes" if packing else "paragraphs"
        raise UsageError(
            f"argument --text: {len(sequences)} sequences of {of} are too few: "
            f"{2 * HELD_OUT} are needed"
        )
    corpus = Corpus(sequences, np.array(labels))
    held_out = np.arange(len(sequences)) % HELD_OUT == HELD_OUT - 1
    return corpus.select(np.flatnonzero(~held_out)), corpus.select(np.flatnonzero(held_out))


def texts(files: list[Path] | None) -> Iterator[bytes]:
    """Yield the contents of the files.

    Raises:
        UsageError: One cannot be read.
    """
    if files is None:
        from pydoc_data.topics import topics

        yield from (topics[name].encode() for name in sorted(topics))
        return
    for file in files:
        try:
            yield file.read_bytes()
        except OSError as error:
            raise UsageError(f"argument --text: cannot read {file}: {error.strerror}") from error


def task(
    corpora: tuple[Corpus, Corpus],
    length: int,
    shards: str,
    alpha: float | None = None,
) -> Task:
    """Return text as a task.

    Args:
        corpora: What is trained on, and what is held out.
        length: See `read`.
        shards: How the training sequences are divided: see `data.shard`.
        alpha: For "dirichlet" shards.
    """
    loaders = partial(batches, *corpora, shards, alpha)
    model = partial(GPT, length)
    return Task("language", model, loaders, loss, metrics, work=tokens, unit="tokens")


def batches(
    train: Corpus,
    test: Corpus,
    shards: str,
    alpha: float | None,
    rank: int,
    size: int,
    batch_size: int,
    seed: int,
) -> tuple[Iterable[Batch], list[Batch]]:
    """Return a rank's batches without end, and on rank 0 the held-out sequences as one batch.

    One rank alone has these, so that the perplexity is that of all of them.
    """
    shard = data.shard(train.labels, rank, size, shards, seed, alpha)
    lengths = np.array(list(map(len, train.sequences)))
    drawn = LengthBatches(
        lengths, shard, batch_size, False, rank, seed, lambda batch: batch_of(train.select(batch))
    )
    few = np.unique(np.linspace(0, len(test.labels) - 1, VALIDATED).astype(int))
    return drawn, [] if rank else [batch_of(test.select(few))]


def batch_of(corpus: Corpus) -> Batch:
    """Return sequences as inputs and targets, int64, shape (sequences, longest); both padded."""
    inputs = [np.concatenate([[END], each[:-1]]) for each in corpus.sequences]
    return padded(inputs, END), padded(corpus.sequences, IGNORED)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of a batch's bytes, in nats."""
    inputs, targets = batch
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def metrics(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the loss, and the perplexity: its exponential, by byte."""
    value = loss(model, batch)
    return {"loss": value.item(), "perplexity": value.exp().item()}


def tokens(batch: Batch) -> int:
    """Return the number of bytes of a batch, without padding."""
    return int((batch[1] != IGNORED).sum())
