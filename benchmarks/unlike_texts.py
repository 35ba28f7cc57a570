"""A task for `--script`: a small GPT learns characters, of other texts on every fourth rank.

The texts ship with Python and scikit-learn: the language's reference, code, descriptions of data,
and tables of numbers. With WAGMA_TEXTS=mixed every rank has parts of all four. The last tenth of
each text is for the test, whose loss is in nats per character.
"""

import functools
import importlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

__all__ = ["data", "loss", "metrics", "model"]

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 2, 64, 96
KINDS, PIECES = 4, 40
MOST = 200_000  # characters of each text


@functools.cache
def texts():
    """Return the four texts as arrays of numbers from 0 to 95: what is printable, and the rest."""
    library = Path(sysconfig.get_path("stdlib"))
    sets = Path(importlib.import_module("sklearn.datasets").__file__).parent
    files = (
        [library / "pydoc_data" / "topics.py"],
        sorted((library / "asyncio").glob("*.py")),
        sorted((sets / "descr").glob("*.rst")),
        sorted((sets / "data").glob("*.csv")),
    )
    found = []
    for each in files:
        characters = np.frombuffer(b"".join(file.read_bytes() for file in each)[:MOST], np.uint8)
        printable = (characters >= 32) & (characters < 127)
        found.append(np.where(printable, characters - 31, 0).astype(np.int64))
    return found


class Block(nn.Module):
    """Attention to what came before, and a layer for each character."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH).triu(1).bool(), False)

    def forward(self, x):
        batch = x.shape[0]
        q, k, v = (
            part.reshape(batch, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.mixed(self.before(x)).split(WIDTH, dim=-1)
        )
        weights = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        attention = weights.masked_fill(self.future, -1e9).softmax(-1) @ v
        x = x + self.out(attention.transpose(1, 2).reshape(batch, LENGTH, WIDTH))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """A transformer of one block, with 20,896 parameters."""

    def __init__(self):
        super().__init__()
        self.characters = nn.Parameter(0.1 * torch.randn(VOCABULARY, WIDTH))
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.block, self.last = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.last(self.block(self.characters[x] + self.places)))


def model():
    return GPT()


def data(rank, size, batch_size, seed):
    train, test = [], []
    for text in texts():
        end = len(text) * 9 // 10
        train.append(text[:end])
        test.append(text[end:])
    generator = np.random.default_rng([seed, rank])
    mixed = os.environ.get("WAGMA_TEXTS") == "mixed"

    def drawn():
        while True:
            kinds = generator.integers(KINDS, size=batch_size) if mixed else [rank % KINDS]
            yield cut([train[kind] for kind in np.resize(kinds, batch_size)], generator)

    tester = np.random.default_rng(0)
    tested = [cut([text] * PIECES, tester) for text in test]
    return drawn(), tested


def cut(from_texts, generator):
    """Return a piece of each text, and the characters that follow its characters."""
    begins = [generator.integers(len(text) - LENGTH - 1) for text in from_texts]
    pieces = [text[b : b + LENGTH + 1] for text, b in zip(from_texts, begins, strict=True)]
    whole = torch.from_numpy(np.stack(pieces))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def loss(model, batch):
    given, following = batch
    return functional.cross_entropy(model(given).reshape(-1, VOCABULARY), following.reshape(-1))


def metrics(model, batch):
    return {"loss": loss(model, batch)}
