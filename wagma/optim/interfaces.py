"""The interfaces of collectives for optimizers, and of optimizers for trainers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from types import TracebackType

__all__ = ["AveragingOptimizer", "Collective"]


@runtime_checkable
class Collective(Protocol):
    """What `Averaging` requires of a collective; `GroupAllreduce` documents the methods."""

    rank: int
    size: int

    @property
    def version(self) -> int:
        """The number of calls that this rank has made."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def average(self, vectors: list[Any], /) -> None:
        """Overwrite the vectors by all ranks' averages, and change nothing else; collective."""

    def synchronize(self, vectors: list[Any], /) -> None:
        """Average over all ranks, which continue from the average; collective."""

    def load(self, vectors: list[Any], version: int, /) -> None:
        """Let all ranks continue from these vectors and this version; collective."""

    def joining(self, vectors: list[Any], /) -> AbstractContextManager[None]:
        """Take part in the others' operations until all have left a block; collective."""

    def statistics(self) -> Any:
        """Return the `collectives.statistics.Statistics` of this rank so far."""

    def fail(self, error: BaseException) -> None:
        """Report this rank's error to all ranks."""

    def close(self) -> None:
        """Leave the collective; collective."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave a block, and report the error that ends it, if any, to all ranks."""


@runtime_checkable
class AveragingOptimizer(Protocol):
    """What `wagma train` requires of an optimizer that averages between ranks.

    Attributes:
        optimizer: the wrapped optimizer, which makes the rank's own steps.
        collective: the collective that averages: at least `statistics` and `fail` of a
            `Collective`.
        result, results: of the call that was completed last, and of those that the last step
            completed: objects with `version`, `timely`, `source`, `synchronized` and `group`.

    Optional: a `module` to compute the loss with; `backward(loss)`, which computes the gradients
    and returns the seconds spent waiting for other ranks; `statistics()`, if there are more than
    its `collective` has now; and `any_goes_on(own)`, which returns whether any rank continues, if
    all ranks make the same number of steps inside `join` as well. If ranks may skip iterations, the
    `collective` has `skipped`, the number that this rank has skipped; training with a number of
    steps then ends when the iterations reach that number.

    `report()`, optional, returns a dict for the run's summary, and is called after `averaged`.
    Values whose names end in "_of_rank" are collected from all ranks; from "met", the ranks that
    were in this rank's groups, the run's ρ is computed; any other value is known to one rank, and
    None on the others.
    """

    optimizer: Any
    collective: Any
    result: Any
    results: list[Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings by name, defaults resolved."""

    def zero_grad(self) -> None:
        """Reset the gradients."""

    def step(self) -> Any:
        """Make a step, and average as the method does; return the loss, if it is known."""

    def complete(self) -> None:
        """Complete the average that the last step started."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return a block in which the model is the average of all ranks' models; collective."""

    def join(self) -> AbstractContextManager[None]:
        """Return a block in which ranks may make different numbers of steps; collective."""

    def close(self) -> None:
        """Leave the collective; collective."""
