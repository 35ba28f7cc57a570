"""The interfaces of collectives for averagers, and of averagers for trainers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

__all__ = ["Averager", "Collective"]


@runtime_checkable
class Collective(Protocol):
    """What an averager requires of a collective; `GroupAllreduce` documents the methods."""

    rank: int
    size: int

    @property
    def version(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def average(self, vectors: list[Any], /) -> None: ...
    def synchronize(self, vectors: list[Any], /) -> None: ...
    def load(self, vectors: list[Any], version: int, /) -> None: ...
    def joining(self, vectors: list[Any], /) -> AbstractContextManager[None]: ...
    def statistics(self) -> Any: ...
    def fail(self, error: BaseException) -> None: ...
    def close(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...


@runtime_checkable
class Averager(Protocol):
    """What `wagma train` requires of what averages between ranks, at the steps of an optimizer.

    Attributes:
        collective: the collective that averages: at least `statistics` and `fail` of a
            `Collective`.
        results: of the calls that the last step completed: objects with `version`, `timely`,
            `source`, `synchronized` and `group`.

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

    collective: Any
    results: list[Any]

    @property
    def result(self) -> Any:
        """The result of the call that was completed last."""

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings by name, defaults resolved."""

    def complete(self) -> None:
        """Complete the average that the last step started."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return a block in which the model is the average of all ranks' models; collective."""

    def join(self) -> AbstractContextManager[None]:
        """Return a block in which ranks may make different numbers of steps; collective."""

    def close(self) -> None:
        """Leave the collective; collective."""
