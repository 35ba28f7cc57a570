"""A Transformer that translates: `wagma train --task translation`."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from wagma import data
from wagma.job import UsageError
from wagma.tasks.contract import Task
from wagma.tasks.grammar import Pair, generated
from wagma.tasks.sequences import IGNORED, LengthBatches, padded

PADDING, UNKNOWN, BEGIN, END = range(4)  # tokens
VOCABULARY = 1000  # pieces at most
CHARACTERS = 700  # that are pieces at most, besides those of the 256 bytes
LONGEST = 128  # tokens of a sentence; longer ones are left out
WIDTH, HEADS, LAYERS = 64, 4, 2
PAIRS, PAIRS_SEED = 4000, 2013  # of generated text
HELD_OUT = 20  # each twentieth pair is not trained on
TRANSLATED = 64  # pairs at most that a model is evaluated on
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Parallel(NamedTuple):
    """Sentences and their translations, as tokens.

    Args:
        sources: Each is int64, of shape (its length,), with END.
        targets: The same for the translations.
    """

    sources: list[np.ndarray]
    targets: list[np.ndarray]

    def select(self, indices: np.ndarray) -> Parallel:
        """Return some of the pairs."""
        return Parallel(*([each[index] for index in indices] for each in self))


class Found(NamedTuple):
    """Parallel text, and the vocabulary that both languages share.

    Args:
        train: What is trained on.
        test: What is held out.
        vocabulary: Sentencepiece's serialized model.
        references: The held-out translations as they were read, before any normalization.
    """

    train: Parallel
    test: Parallel
    vocabulary: bytes
    references: list[str]


class Transformer(nn.Module):
    """Encoder and decoder (Vaswani et al., 2017), with one embedding for both and for the output.

    Args:
        pieces: Of the vocabulary.
        layers: Of the encoder, and of the decoder.
    """

    def __init__(self, pieces: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.token = nn.Embedding(pieces, WIDTH)
        nn.init.normal_(self.token.weight, std=WIDTH**-0.5)
        layer = WIDTH, HEADS, 2 * WIDTH, 0.0
        encoder = nn.TransformerEncoderLayer(*layer, batch_first=True, norm_first=True)
        decoder = nn.TransformerDecoderLayer(*layer, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(
            encoder, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder, layers, nn.LayerNorm(WIDTH))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, target length, pieces), of each token's successor.

        Args:
            source: Tokens, int64, shape (batch, source length), padded.
            target: The translations' tokens so far, int64, shape (batch, target length), padded.
        """
        return self.decode(target, self.encode(source), source == PADDING)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """Return the encoder's output, shape (batch, source length, width)."""
        return self.encoder(self._embed(source), src_key_padding_mask=source == PADDING)

    def decode(
        self, target: torch.Tensor, memory: torch.Tensor, blank: torch.Tensor, last: bool = False
    ) -> torch.Tensor:
        """Return logits as `forward` does, from the encoder's output and where that is padding.

        Args:
            target: As for `forward`.
            memory: The encoder's output.
            blank: Where the source is padding, shape (batch, source length).
            last: Only the last token's successor's, shape (batch, 1, pieces).
        """
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        output = self.decoder(
            self._embed(target),
            memory,
            tgt_mask=mask,
            memory_key_padding_mask=blank,
            tgt_is_causal=True,
        )
        return functional.linear(output[:, -1:] if last else output, self.token.weight)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) * WIDTH**0.5 + waves(tokens.shape[1], tokens.device)


def waves(length: int, device: torch.device) -> torch.Tensor:
    """Return the sinusoidal encoding of positions, float32, shape (length, WIDTH)."""
    places = torch.arange(length, device=device)[:, None]
    rates = torch.exp(torch.arange(0, WIDTH, 2, device=device) * (-math.log(10000) / WIDTH))
    return torch.cat([(places * rates).sin(), (places * rates).cos()], dim=1)


def read(files: list[Path] | None) -> Found:
    """Return parallel text as tokens.

    Args:
        files: Two text files, with a sentence in each line of the first and its translation in the
            same line of the second; None: generated text.

    Raises:
        UsageError: They cannot be read, are not parallel, or are too short.
    """
    from sentencepiece import SentencePieceProcessor

    pairs = parallel(*files) if files else generated(PAIRS, PAIRS_SEED)
    check_enough(len(pairs), "pairs")
    vocabulary = learn_vocabulary([sentence for pair in pairs for sentence in pair])
    processor = SentencePieceProcessor(model_proto=vocabulary)
    sources, targets = (
        [np.array([*tokens, END]) for tokens in processor.encode(list(sentences))]
        for sentences in zip(*pairs)
    )
    short = [len(a) <= LONGEST and len(b) <= LONGEST for a, b in zip(sources, targets)]
    kept = np.flatnonzero(short)
    whole = Parallel(sources, targets).select(kept)
    count = len(kept)
    check_enough(count, f"pairs of at most {LONGEST} tokens")
    held_out = np.arange(count) % HELD_OUT == HELD_OUT - 1
    train, test = (whole.select(np.flatnonzero(each)) for each in (~held_out, held_out))
    return Found(train, test, vocabulary, [pairs[index][1] for index in kept[held_out]])


def check_enough(count: int, what: str) -> None:
    """Raise UsageError unless some of so many pairs can be held out."""
    if count < HELD_OUT:
        raise UsageError(f"argument --text: {count} {what} are too few: {HELD_OUT} are needed")


def parallel(source: Path, target: Path) -> list[Pair]:
    """Return the lines of two files that both are not blank, in pairs.

    Each pair is returned once, however often it occurs: else it could be trained on and held out.
    Lines end with a newline, perhaps after a carriage return, and with nothing else that Unicode
    knows as the end of a line: such characters are in texts of the web.

    Raises:
        UsageError: One cannot be read, or they have different numbers of lines.
    """
    both = []
    for file in (source, target):
        try:
            text = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"argument --text: cannot read {file}: {why}") from error
        lines = text.removesuffix("\n").split("\n") if text else []
        both.append([line.removesuffix("\r") for line in lines])
    if len(both[0]) != len(both[1]):
        raise UsageError(
            f"argument --text: {source} has {len(both[0])} lines and {target} {len(both[1])}: "
            "each line must be the translation of the same line"
        )
    return list(dict.fromkeys((a, b) for a, b in zip(*both) if a.strip() and b.strip()))


def learn_vocabulary(sentences: list[str]) -> bytes:
    """Return a sentencepiece model of these sentences.

    The most frequent characters are pieces of it, `CHARACTERS` at most: rarer ones, as Chinese has
    them, are spelled by bytes.

    Raises:
        UsageError: They are too few.
    """
    from sentencepiece import SentencePieceTrainer

    counts = Counter(chain.from_iterable(sentences)).most_common()
    rare = {ord(character): " " for character, _ in counts[CHARACTERS:]}
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(sentence.translate(rare) for sentence in sentences),
            model_writer=model,
            vocab_size=VOCABULARY,
            hard_vocab_limit=False,
            byte_fallback=True,  # no text has unknown tokens
            pad_id=PADDING,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
            num_threads=1,
            minloglevel=2,
        )
    except (OSError, RuntimeError) as error:
        raise UsageError(f"argument --text: no vocabulary can be learnt: {error}") from error
    return model.getvalue()


class Translation:
    """The functions of the task that need the vocabulary.

    Args:
        found: The text.
        by_tokens: Whether batches are equal in tokens, in place of sentences.
    """

    def __init__(self, found: Found, by_tokens: bool) -> None:
        self.found, self.by_tokens = found, by_tokens

    @cached_property
    def processor(self) -> Any:
        """The vocabulary."""
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self.found.vocabulary)

    @cached_property
    def references(self) -> dict[tuple[int, ...], str]:
        """The held-out translations as they were read, by their tokens."""
        targets = (tuple(each.tolist()) for each in self.found.test.targets)
        return dict(zip(targets, self.found.references))

    def model(self) -> Transformer:
        """Return the model."""
        return Transformer(len(self.processor))

    def data(
        self, rank: int, size: int, batch_size: int, seed: int
    ) -> tuple[Iterable[Batch], list[Batch]]:
        """Return a rank's batches without end, and on rank 0 the held-out pairs as one batch.

        One rank alone has these, since the BLEU of all is not the mean of that of parts.
        """
        train, test = self.found.train, self.found.test
        lengths = np.array([len(a) + len(b) for a, b in zip(*train)])
        shard = data.shard(np.zeros(len(lengths)), rank, size, "iid", seed)
        drawn = LengthBatches(
            *(lengths, shard, batch_size, self.by_tokens, rank, seed),
            lambda batch: batch_of(train.select(batch)),
        )
        few = np.arange(min(TRANSLATED, len(test.sources)))
        return drawn, [] if rank else [batch_of(test.select(few))]

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Return the BLEU of the translations of held-out sources, from 0 to 100, and the loss."""
        from sacrebleu import corpus_bleu

        source, _, targets = batch
        translated = self.words(translate(model, source))
        rows = (row[: row.index(END) + 1] for row in targets.tolist())
        bleu = corpus_bleu(translated, [[self.references[tuple(row)] for row in rows]])
        return {"bleu": bleu.score, "loss": loss(model, batch).item()}

    def words(self, tokens: torch.Tensor) -> list[str]:
        """Return as text what is before the end of each row of tokens."""
        rows = tokens.tolist()
        return self.processor.decode([row[: row.index(END)] if END in row else row for row in rows])


def task(found: Found, by_tokens: bool) -> Task:
    """Return parallel text as a task: see `Translation`."""
    its = Translation(found, by_tokens)
    return Task("translation", its.model, its.data, loss, its.metrics, work=tokens, unit="tokens")


def batch_of(parallel: Parallel) -> Batch:
    """Return sources, the decoder's inputs, and targets, int64, shape (pairs, longest), padded."""
    inputs = [np.concatenate([[BEGIN], each[:-1]]) for each in parallel.targets]
    return (
        padded(parallel.sources, PADDING),
        padded(inputs, PADDING),
        padded(parallel.targets, IGNORED),
    )


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of the targets' tokens, in nats."""
    source, inputs, targets = batch
    logits = model(source, inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def tokens(batch: Batch) -> int:
    """Return the number of a batch's tokens in both languages, without padding."""
    source, _, targets = batch
    return int((source != PADDING).sum() + (targets != IGNORED).sum())


def translate(model: Any, source: torch.Tensor) -> torch.Tensor:
    """Return the likeliest next token again and again, int64, shape (batch, length).

    A translation ends with END, or where it is half as long again as its source and 5 tokens more.

    Args:
        model: A `Transformer`.
        source: Tokens, int64, shape (batch, source length), padded.
    """
    memory, blank = model.encode(source), source == PADDING
    room = (1.5 * (~blank).sum(1) + 5).long()
    translated = source.new_full((len(source), int(room.max())), END)
    rows = torch.arange(len(source), device=source.device)  # of translations that go on
    written = source.new_full((len(source), 1), BEGIN)
    while len(rows):
        following = model.decode(written, memory, blank, last=True)[:, 0].argmax(1)
        translated[rows, written.shape[1] - 1] = following
        goes_on = (following != END) & (written.shape[1] < room[rows])
        written = torch.cat([written, following[:, None]], dim=1)[goes_on]
        rows, memory, blank = rows[goes_on], memory[goes_on], blank[goes_on]
    return translated
