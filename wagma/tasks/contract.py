"""The contract between `wagma train` and what it trains.

A task is three functions, which a script defines at its top level::

    def model() -> torch.nn.Module
    def data(rank, size, batch_size, seed) -> (training batches, test batches)
    def loss(model, batch) -> scalar tensor

``model`` is called with torch's generator seeded alike on all ranks, ``data`` and ``loss`` after
each rank's has been seeded differently. A batch is any value that ``loss`` accepts. The training
batches are a rank's own part: an iterable, such as a ``DataLoader``, that starts again when it is
exhausted, or one without end. Test batches may be the same on every rank or a part each. A fourth
function may return what to report for the test batches, in place of the loss::

    def metrics(model, batch) -> dict[str, float]

Two more may return the optimizer of a rank's own steps, and its learning-rate scheduler::

    def optimizer(parameters) -> torch.optim.Optimizer
    def scheduler(optimizer) -> one of torch.optim.lr_scheduler

The next tells how much work a training batch is, such as its number of tokens, if batches
differ; the steps of ranks are compared by it::

    def work(batch) -> float

Another one takes the record of each step of its rank, for other tools than this one::

    def log(record: dict) -> None

``loss`` and ``metrics`` are called once more before the first step, to find mistakes in them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from wagma.job import UsageError
from wagma.tasks.endless import Endless, shield_workers

RANK_STREAM = 4


class Task(NamedTuple):
    """A training task.

    Args:
        name: Its name in messages, for instance the script's file name.
        model: Returns the model; all ranks start from rank 0's values.
        data: Takes rank, size, batch size and seed, and returns two iterables of batches.
        loss: Takes the model and a batch, and returns the mean loss, a scalar tensor.
        metrics: Takes the model and a test batch, and returns numbers that are means over it.
        optimizer: Takes the list of the model's parameters, and returns the optimizer of a rank's
            own steps.
        scheduler: Takes the optimizer, and returns its learning-rate scheduler, stepped after every
            training step of its rank.
        work: Takes a training batch, and returns how much work it is, in any unit.
        log: Takes the record of a step, after it, with this rank's number as "rank".
        unit: The unit of the work, in the plural.
        recorded: Further fields of a step's record: functions that take a training batch after its
            loss was computed, and return a number; None: there is none yet.
        reported: The name, in the plural, of what a run's summary counts per second, and the work
            of each of these; None: the unit, and 1.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int, int, int, int], tuple[Iterable, Iterable]]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    metrics: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    work: Callable[[Any], float] | None = None
    log: Callable[[dict[str, Any]], Any] | None = None
    unit: str = "work"
    recorded: Mapping[str, Callable[[Any], float | None]] = MappingProxyType({})
    reported: tuple[str, float] | None = None

    def measure(self, model: nn.Module, batch: Any) -> dict[str, float]:
        """Return the values to report for a test batch: the script's metrics, or the loss."""
        if self.metrics is None:
            return {"loss": float(self.loss(model, batch))}
        return {name: float(value) for name, value in self.metrics(model, batch).items()}

    def check_work(self) -> None:
        """Raise UsageError unless the task tells how much work its batches are."""
        if self.work is None:
            raise UsageError(f"{self.name} has no work(batch), by which its steps could take time")

    def work_of(self, batches: Iterable[Any]) -> float:
        """Return how much work batches are together, by which a step takes time.

        Raises:
            UsageError: The task tells no number of 0 or more.
        """
        assert self.work is not None  # `check_work`
        amounts = [float(self.work(each)) for each in batches]
        for amount in amounts:
            if not 0 <= amount < math.inf:
                raise UsageError(f"{self.name}: work() returned {amount}, not 0 or more")
        return sum(amounts)


class Prepared(NamedTuple):
    """A task on one rank, ready to be trained.

    Args:
        model: The model, on its device.
        batches: Endless training batches.
        test: Test batches.
    """

    model: nn.Module
    batches: Endless
    test: Iterable


def prepare(
    task: Task, rank: int, size: int, batch_size: int, seed: int, *, keeps_position: bool = True
) -> Prepared:
    """Call a task's functions as the contract says, and check what they return.

    Args:
        task: The task to train.
        rank: This rank, 0 to size - 1.
        size: The number of ranks.
        batch_size: Samples per rank and batch.
        seed: The job's seed.
        keeps_position: See `Endless`.

    Raises:
        UsageError: A function returned a value that the contract does not allow.
    """
    seed_generators(seed)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{task.name}: model() returned {a_or_an(model)}, not a torch.nn.Module")
    seed_generators(int(np.random.SeedSequence([seed, RANK_STREAM, rank]).generate_state(1)[0]))
    both = deal(task, rank, size, batch_size, seed)
    batches, test = Endless(both[0], task.name, keeps_position), both[1]
    first = batches.peek()
    if first is None:
        raise UsageError(f"{task.name}: data() returned no training batches")
    with nothing_changed(model):
        check_loss(task, model, first)
    first_test = next(tests := iter(test), None)
    if first_test is not None:
        with nothing_changed(model), torch.no_grad():
            model.eval()
            check_metrics(task, model, first_test)
            if tests is test:  # they cannot be iterated over again, as each evaluation does
                test = [first_test, *tests]
    return Prepared(model, batches, test)


def metric_names(task: Task, prepared: Prepared) -> list[str]:
    """Return the names of what a task reports for this rank's test batches, [] without any."""
    first = next(iter(prepared.test), None)
    if first is None:
        return []
    with nothing_changed(prepared.model), torch.no_grad():
        prepared.model.eval()
        return list(task.measure(prepared.model, first))


def deal(task: Task, rank: int, size: int, batch_size: int, seed: int) -> tuple[Iterable, Iterable]:
    """Return a rank's training batches and test batches, as the task deals them.

    Args:
        task, rank, size, batch_size, seed: As for `prepare`.

    Raises:
        UsageError: The task returned something else.
    """
    both = task.data(rank, size, batch_size, seed)
    if not (isinstance(both, (tuple, list)) and len(both) == 2):
        raise UsageError(
            f"{task.name}: data() returned {a_or_an(both)}, not a pair: the training batches "
            "and the test batches"
        )
    for kind, batches in zip(("training", "test"), both):
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise UsageError(
                f"{task.name}: data() returned {a_or_an(batches)} as {kind} batches, not an "
                "iterable such as a DataLoader"
            )
        shield_workers(batches)
    return both[0], both[1]


def seed_generators(seed: int) -> None:
    """Seed the generators that a task may draw from: torch's, numpy's and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def check_loss(task: Task, model: nn.Module, batch: Any) -> None:
    """Compute the loss once, and raise UsageError if it has no gradient."""
    loss = task.loss(model, batch)
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"{task.name}: loss() returned {a_or_an(loss)}, not a scalar tensor")
    if loss.ndim != 0:
        shape = tuple(loss.shape)
        raise UsageError(f"{task.name}: loss() returned a tensor of shape {shape}, not a scalar")
    if not loss.requires_grad:
        raise UsageError(f"{task.name}: what loss() returned has no gradient")


def check_metrics(task: Task, model: nn.Module, batch: Any) -> None:
    """Measure a test batch once, and raise UsageError unless that gives named numbers."""
    values = task.metrics(model, batch) if task.metrics else task.measure(model, batch)
    if not isinstance(values, Mapping):
        raise UsageError(f"{task.name}: metrics() returned {a_or_an(values)}, not a dict")
    for name, value in values.items():
        try:
            float(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{task.name}: metrics() returned {a_or_an(value)} as {name!r}, not a number"
            ) from error


@contextmanager
def nothing_changed(model: nn.Module) -> Iterator[None]:
    """Restore the generators, the model's buffers and its modules' modes after the block."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (buffer, buffer.clone()) for buffer in model.buffers() if not nn.parameter.is_lazy(buffer)
    ]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    places = {each.device for each in model.parameters() if each.device.type != "cpu"}
    kinds = [each.type for each in places]
    with torch.random.fork_rng(list(places), device_type=kinds[0] if kinds else "cuda"):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for module, training in modes.items():
        module.training = training


def samples(batch: Any) -> int | None:
    """Return a batch's number of samples: the length of its first array, None without any."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((n for n in map(samples, batch) if n is not None), None)
    return None


def elements(batch: Any) -> int:
    """Return the number of elements of a batch's arrays, 0 without any."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return math.prod(shape)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return sum(map(elements, batch))
    return 0


class Means:
    """The means of the metrics of test batches, each weighted by its number of samples."""

    def __init__(self) -> None:
        self.samples = 0
        self.sums: dict[str, float] = {}

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Add a batch, or several batches whose means are ``values``."""
        self.samples += samples
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + samples * value

    def means(self) -> dict[str, float]:
        """Return the means of all batches added."""
        return {name: total / self.samples for name, total in self.sums.items()}


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, test: Iterable) -> Means:
    """Measure a model on this rank's test batches.

    Args:
        task: The task that is trained.
        model: The model, which is in evaluation mode meanwhile and unchanged afterwards.
        test: The batches.
    """
    means = Means()
    with nothing_changed(model):
        model.eval()
        for batch in test:
            count = samples(batch)
            if count != 0:  # a rank may have no part of a small test set
                means.add(task.measure(model, batch), 1 if count is None else count)
    return means


def all_ranks(each: Iterable[Means]) -> dict[str, float]:
    """Return the means over all ranks' test batches; an empty dict without any."""
    together = Means()
    for one in each:
        if one.samples:
            together.add(one.means(), one.samples)
    return together.means() if together.samples else {}


def a_or_an(value: object) -> str:
    """Return the name of a value's type, for messages."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
