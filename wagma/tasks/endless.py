"""Training batches without end, whose position can be saved and continued from."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from wagma import generators

log = logging.getLogger(__name__)


class Endless:
    """An iterator over batches that starts again whenever they are exhausted.

    A sampler that needs the epoch, as torch's ``DistributedSampler`` does, is given it. Batches
    with a `state_dict` of their own, or whose ``batch_sampler`` has one, know their position. Else
    it is the number of batches drawn in this pass, and the generators as they were at its
    beginning; a ``DataLoader`` of a map-style data set goes there without loading what it skips.

    Args:
        batches: An iterable, such as a ``DataLoader``.
        name: The task's, for messages.
        keeps_position: Whether the position may be asked for; the batches are not asked for theirs
            otherwise.

    Raises:
        RuntimeError: When it is drawn from: it can be iterated over only once. If it is empty from
            the beginning, it ends.
    """

    def __init__(self, batches: Iterable[Any], name: str, keeps_position: bool = True) -> None:
        self._name, self._keeps_position = name, keeps_position
        self._use(batches)
        self._next: Iterable[Any] | None = None
        self._epoch = self._drawn = 0
        # Samples of the pass that other numbers of ranks have drawn, of all ranks' together.
        self._dealt = 0
        self._may_be_empty = False
        self._iterator: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._begun: dict[str, Any] | None = None  # the generators at the beginning of the pass
        self._before = None if self._source is None else copy.deepcopy(self._source.state_dict())

    def _use(self, batches: Iterable[Any]) -> None:
        self._batches: Any = batches
        self._source: Any = source_of(batches) if self._keeps_position else None

    def renew(self, batches: Iterable[Any]) -> None:
        """Go on with other batches from the next pass on, or now if this one has no end.

        That is known of an iterator, and of a loader whose sampler or batch sampler is one.
        """
        self._next = batches
        samplers = (getattr(self._batches, name, None) for name in ("sampler", "batch_sampler"))
        if any(isinstance(each, Iterator) for each in (self._batches, *samplers)):
            self._peeked = []
            self._end_pass()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._peeked.pop() if self._peeked else self._draw()

    def peek(self) -> Any:
        """Return the first batch, which is drawn again; None if there is none."""
        self._peeked = list(itertools.islice(self, 1))
        return self._peeked[0] if self._peeked else None

    def _draw(self) -> Any:
        while True:
            if self._iterator is None:
                self._iterator = self._begin()
            for batch in self._iterator:
                self._drawn += 1
                return batch
            if not self._drawn and not self._may_be_empty:
                if self._epoch:
                    raise RuntimeError(
                        f"{self._name}: the training batches cannot be iterated over again: return "
                        "a DataLoader, a list, or an iterator without end"
                    )
                raise StopIteration
            self._end_pass()
            log.debug("the training batches start again after pass %d", self._epoch)

    def _end_pass(self) -> None:
        self._epoch += 1
        self._drawn, self._dealt, self._iterator = 0, 0, None
        self._may_be_empty = False
        if self._next is not None:
            self._use(self._next)
            self._next = None

    def _begin(self) -> Iterator[Any]:
        """Begin a pass."""
        self._tell_epoch()
        if self._keeps_position:
            self._begun = generators_of(self._batches)
        if isinstance(self._source, Delivered):
            return self._source.batches()
        return iter(self._batches)

    def _tell_epoch(self) -> None:
        sampler: Any = getattr(self._batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, after the batches that were handed out."""
        drawn = self._drawn - len(self._peeked)
        source = None
        if self._source is not None:
            source = self._before if self._peeked else self._source.state_dict()
        return {
            "epoch": self._epoch,
            "drawn": drawn,
            "dealt": self._dealt,
            "sharers": sharers_of(self._batches),
            "begun": self._begun,
            "peeked": bool(self._peeked),
            "source": source,
        }

    def load_state_dict(self, position: dict[str, Any]) -> None:
        """Go to a position that this rank had; the generators are changed."""
        here = self._drawn  # in this process, of an iterator that cannot start again
        peeked, self._peeked, self._iterator, self._may_be_empty = self._peeked, [], None, True
        self._epoch, self._drawn = position["epoch"], position["drawn"]
        self._dealt, self._begun = position["dealt"], position["begun"]
        if self._source is not None:
            self._source.load_state_dict(position["source"])
            self._before = position["source"]
            if position["peeked"] and self._begun is not None:
                restore_generators(self._batches, self._begun)
            if self._drawn or position["peeked"]:  # it may draw from the generators: do so now
                self._iterator = self._begin()
        elif self._begun is not None:
            restore_generators(self._batches, self._begun)
            self._tell_epoch()
            if isinstance(self._batches, Iterator):
                if self._drawn < here:
                    self._peeked, self._drawn = peeked, here
                    return
                self._iterator = after(self._batches, self._drawn - here)
            else:
                self._iterator = after(rest_of(self._batches, self._dealt), self._drawn)
        if position["peeked"]:
            self.peek()

    def deal(self, positions: list[dict[str, Any]], rank: int, size: int) -> None:
        """Go on with this rank's part of what other ranks have not drawn of their passes.

        Args:
            positions: Those of all ranks that shared the samples until now.
            rank, size: This rank, and the number of those that share the rest.
        """
        self._peeked, self._iterator, self._drawn, self._may_be_empty = [], None, 0, True
        self._epoch = max(each["epoch"] for each in positions)
        self._begun = generators_of(self._batches)
        if hasattr(self._source, "deal"):
            self._source.deal([each["source"] for each in positions], rank, size)
            return
        if not is_distributed(self._batches):
            log.warning(
                "%s: the pass over the training batches begins anew on another number of ranks: "
                "only a DataLoader with a DistributedSampler, or one's own deal(), goes on in it",
                self._name,
            )
            return
        now = [each for each in positions if each["epoch"] == self._epoch]
        # As if all had drawn as much as the one that has drawn most, also those that have died: a
        # position in the common order is all that is kept, and no sample is to come twice.
        drawn = max(each["drawn"] for each in now) * self._batches.batch_size
        sharers = max(len(positions), *(each["sharers"] for each in now))
        self._dealt = drawn * sharers + max(each["dealt"] for each in now)
        self._tell_epoch()
        self._iterator = iter(rest_of(self._batches, self._dealt))


class Delivered:
    """A batch sampler whose position is that after the batches that a loader's workers delivered.

    They are sent the indices of further ones ahead.

    Args:
        loader: With workers, and a batch sampler with a `state_dict`, whose ``deal`` is this one's.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler = loader.batch_sampler
        self._loader = like(loader, self, loader.persistent_workers)
        self._state = copy.deepcopy(self._sampler.state_dict())
        self._ahead: deque[dict[str, Any]] = deque()  # the states after what is sent ahead
        if hasattr(self._sampler, "deal"):
            self.deal = self._deal

    def __iter__(self) -> Iterator[Any]:
        """Yield the sampler's batches, and note its state after each."""
        for indices in self._sampler:
            self._ahead.append(copy.deepcopy(self._sampler.state_dict()))
            yield indices

    def batches(self) -> Iterator[Any]:
        """Return an iterator over what the loader delivers, from its sampler's state on."""
        self._ahead.clear()
        return self._noting(iter(self._loader))  # here, since it may draw from the generators

    def _noting(self, delivered: Iterator[Any]) -> Iterator[Any]:
        for batch in delivered:
            self._state = self._ahead.popleft()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state when the batch that was delivered last was drawn."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        self._sampler.load_state_dict(state)
        self._state = state

    def _deal(self, states: list[dict[str, Any]], rank: int, size: int) -> None:
        self._sampler.deal(states, rank, size)
        self._state = copy.deepcopy(self._sampler.state_dict())


class Later:
    """A sampler's batches after the first ones, which it skips when it is primed.

    Args:
        sampler: yields the indices of batches.
        count: number of batches to skip.
    """

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler, self._count = sampler, count
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.prime())

    def prime(self) -> Iterator[Any]:
        """Skip what is to be skipped, if that has not been done, and return the rest."""
        if self._iterator is None:
            self._iterator = itertools.islice(iter(self._sampler), self._count, None)
            first = list(itertools.islice(self._iterator, 1))
            self._iterator = itertools.chain(first, self._iterator)
        return self._iterator


def source_of(batches: Any) -> Any:
    """Return what knows the position of the batches: they, or their batch sampler; None: nobody."""
    for each in (batches, getattr(batches, "batch_sampler", None)):
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            ahead = each is not batches and batches.num_workers and is_plain(batches)
            return Delivered(batches) if ahead else each
    return None


def own_generators(batches: Any) -> list[torch.Generator]:
    """Return a loader's own generator and those of its samplers, each once."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    inner = getattr(batches, "sampler", None), getattr(batch_sampler, "sampler", None)
    found = (getattr(each, "generator", None) for each in (batches, batch_sampler, *inner))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def generators_of(batches: Any) -> dict[str, Any]:
    """Return the states of all generators from which a pass over batches may draw."""
    own = [each.get_state() for each in own_generators(batches)]
    return {"all": generators.states(), "own": own}


def restore_generators(batches: Any, states: dict[str, Any]) -> None:
    """Set the generators to what `generators_of` has returned."""
    generators.restore(states["all"])
    own = states["own"]  # in older checkpoints the loader's alone, or None
    own = own if isinstance(own, list) else [own] * (own is not None)
    for generator, state in zip(own_generators(batches), own):
        generator.set_state(state)


def is_plain(batches: Any) -> bool:
    """Return whether these are torch's loader of a data set with indices, in batches."""
    return (
        type(batches) is DataLoader
        and batches.batch_sampler is not None
        and not isinstance(batches.dataset, IterableDataset)
    )


def after(batches: Any, count: int) -> Iterator[Any]:
    """Return an iterator over batches after the first ones, which are not loaded if possible."""
    if not is_plain(batches):
        iterator = iter(batches)
        for _ in itertools.islice(iterator, count):  # now, with the generators of then
            pass
        return iterator
    later = Later(batches.batch_sampler, count)
    iterator = iter(like(batches, later))
    later.prime()  # here, where the generators are those of the pass's beginning
    return iterator


def is_distributed(batches: Any) -> bool:
    """Return whether these are the batches of a loader that deals a data set to ranks in turn."""
    return is_plain(batches) and isinstance(batches.sampler, DistributedSampler)


def sharers_of(batches: Any) -> int:
    """Return the number of ranks to which a loader deals its data set; 0: not known."""
    return int(batches.sampler.num_replicas) if is_distributed(batches) else 0


def rest_of(batches: Any, dealt: int) -> Any:
    """Return batches without the first samples of the pass, of which there are so many in all."""
    if not dealt:
        return batches
    sampler = batches.sampler
    own = max(0, math.ceil((dealt - sampler.rank) / sampler.num_replicas))
    rest = Later(sampler, own)
    return like(batches, BatchSampler(rest, batches.batch_size, batches.drop_last))


def like(
    loader: DataLoader[Any], batch_sampler: Any, persistent_workers: bool = False
) -> DataLoader[Any]:
    """Return a loader of the same data with another sampler."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=persistent_workers,
    )


def shield_workers(batches: Any) -> None:
    """Let the workers of a loader, if these batches are one's, ignore a batch system's signals."""
    if isinstance(batches, DataLoader) and batches.num_workers:
        batches.worker_init_fn = partial(shield, batches.worker_init_fn)


def shield(then: Callable[[int], None] | None, worker: int) -> None:
    """Let a loader's worker ignore signals that a batch system sends to all processes of a job.

    A worker that died of one would end its rank before that can save anything. SIGTERM from the
    rank itself still ends it.

    Args:
        then: The loader's own function to call in a worker.
        worker: The worker's number.
    """
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = multiprocessing.parent_process()  # which may not be what has started it
    assert parent is not None
    threading.Thread(target=obey_parent, args=(signals, parent.pid), daemon=True).start()
    if then is not None:
        then(worker)


def obey_parent(signals: set[signal.Signals], parent: int) -> None:
    """Take these signals, and end the process at one that its parent has sent."""
    while True:
        taken = signal.sigwaitinfo(signals)
        if taken.si_pid == parent:
            os._exit(0)
