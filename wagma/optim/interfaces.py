"""What an optimizer asks of a collective, and a trainer of an optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

__all__ = ["AveragingOptimizer", "Collective"]


@runtime_checkable
class Collective(Protocol):
    """What `Averaging` asks of a collective; what it means is said in `GroupAllreduce`."""

    size: int
    version: int
    closed: bool

    def average(self, vectors: list) -> None:
        """Overwrite the vectors by all ranks' averages, and change nothing else; collective."""

    def synchronize(self, vectors: list) -> None:
        """Average over all ranks, which go on from there; collective."""

    def load(self, vectors: list, version: int) -> None:
        """Let all ranks go on from these vectors and this version; collective."""

    def joining(self, vectors: list) -> AbstractContextManager:
        """Take part in what the others do until all have left a block; collective."""

    def statistics(self) -> Any:
        """Return the `collectives.statistics.Statistics` of this rank so far."""

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of this one's error."""

    def close(self) -> None:
        """Leave; collective."""

    def __exit__(self, kind, error, trace) -> None:
        """Leave a block, and tell all ranks of the error that ends it, if one does."""


@runtime_checkable
class AveragingOptimizer(Protocol):
    """What `wagma train` asks of an optimizer that averages between ranks.

    Attributes:
        optimizer: the wrapped one, which makes the rank's own steps.
        collective: what averages: at least `statistics` and `fail` of a `Collective`.
        settings: the method's settings by name, defaults resolved.
        result, results: of the last call that was completed, and of those that the last step has
            completed: what has `version`, `timely`, `source`, `synchronized` and `group`.

    It may have a `module`, with which the loss is to be computed; `backward(loss)`, which computes
    the gradients and returns for how many seconds others were waited for; and `any_goes_on(own)`,
    where all ranks make as many steps inside `join` as well: whether any rank would go on. Where
    ranks may skip iterations its `collective` has `skipped`, how many this rank has so far: a
    training that does not end by time ends by iterations.

    What it says of a run beside its statistics is a dict that `report()` returns, asked for after
    `averaged`. Of a name that ends in "_of_rank" all ranks' values are put together; of "met", whom
    a rank's groups were with, the run's ρ is computed; any other is of the one rank that knows it,
    and None elsewhere.
    """

    optimizer: Any
    collective: Any
    settings: dict[str, Any]
    result: Any
    results: list

    def zero_grad(self) -> None:
        """Reset the gradients."""

    def step(self) -> Any:
        """Make a step, and average as the method does."""

    def complete(self) -> Any:
        """Complete what the last step has only started."""

    def averaged(self) -> AbstractContextManager:
        """Hold the average of all ranks' models in the model; collective."""

    def join(self) -> AbstractContextManager:
        """Let ranks make different numbers of steps inside; collective."""

    def close(self) -> None:
        """Leave; collective."""
