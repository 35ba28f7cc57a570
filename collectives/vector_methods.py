"""Methods of collectives that take a vector: how they are marked.

`takes_vector` and `reads_vector` leave a method for numpy arrays as it is. In a collective whose
vectors are on a CUDA device all marked methods are replaced by methods with an argument `stream`,
with which type checkers see them: see `collectives.device`.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

from collectives.typing import Stream, Vector

__all__ = ["marked", "reads_vector", "takes_vector"]

Result = TypeVar("Result", covariant=True)
Weight = TypeVar("Weight", contravariant=True)


# --- What type checkers see: how a method is written, and how it is called


class _Plain(Protocol[Result]):
    def __call__(self, collective: Any, /, vector: Vector) -> Result: ...


class _Weighted(Protocol[Weight, Result]):
    def __call__(self, collective: Any, /, vector: Vector, *, weight: Weight = ...) -> Result: ...


class _Loading(Protocol[Result]):
    def __call__(self, collective: Any, /, vector: Vector, version: int) -> Result: ...


class _PlainMethod(Protocol[Result]):
    def __call__(self, vector: Vector, *, stream: Stream | None = None) -> Result: ...


class _WeightedMethod(Protocol[Weight, Result]):
    def __call__(
        self, vector: Vector, *, weight: Weight = ..., stream: Stream | None = None
    ) -> Result: ...


class _LoadingMethod(Protocol[Result]):
    def __call__(self, vector: Vector, version: int, *, stream: Stream | None = None) -> Result: ...


class _Marking(Protocol):
    @overload
    def __call__(self, method: _Weighted[Weight, Result]) -> _WeightedMethod[Weight, Result]: ...
    @overload
    def __call__(self, method: _Loading[Result]) -> _LoadingMethod[Result]: ...
    @overload
    def __call__(self, method: _Plain[Result]) -> _PlainMethod[Result]: ...


# --- What happens


def _marking(changes: bool) -> Any:
    def mark(method: Any) -> Any:
        method.changes_vector = changes
        return method

    return mark


takes_vector: _Marking = _marking(True)
"""Mark a method that may change its vector."""

reads_vector: _Marking = _marking(False)
"""Mark a method that only reads its vector."""


def marked(kind: type) -> dict[str, bool]:
    """Return by name which methods of a class take a vector, and whether they may change it.

    A method that overrides a marked one takes a vector, too.
    """
    return {
        name: method.changes_vector
        for base in reversed(kind.__mro__)
        for name, method in vars(base).items()
        if hasattr(method, "changes_vector")
    }
