"""Joining several collectives at once."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from collectives.typing import Vector

__all__ = ["join"]


class Joined(Protocol):
    """The interface that `join` requires of a collective."""

    def joining(self, vector: Any) -> contextlib.AbstractContextManager[None]:
        """Begin to join; wait for the other ranks at the end of the block."""


def join(*pairs: tuple[Joined, Vector], stream: Any = None) -> None:
    """Join several collectives at once: make no more calls, and take part in the others' calls.

    Returns when all ranks have joined. A rank that waited in `join` of one collective could not
    take part in the calls of the next, in which ranks with more calls would wait for it; this
    function joins all collectives before it waits for any. All ranks pass the same collectives in
    the same order.

    Args:
        pairs: tuples of a collective and its vector, as the collective's own `join` takes it:
            arrays with the dtypes and lengths of those that it was constructed with.
        stream: the stream on which vectors on CUDA devices are ready, and will be used next: one
            stream for all pairs, or a list with a stream or None for each; by default the streams
            that the arrays name.

    Raises:
        TypeError: a stream is given for numpy arrays.
        ValueError: the number of streams differs from the number of pairs.

    Example:
        >>> collectives.join((generators, x), (discriminators, y))
    """
    streams = stream if isinstance(stream, (list, tuple)) else [stream] * len(pairs)
    if len(streams) != len(pairs):
        raise ValueError(
            f"stream has length {len(streams)}, not {len(pairs)}, the number of vectors"
        )
    with contextlib.ExitStack() as stack:
        for (collective, vector), ready in zip(pairs, streams):
            given: dict[str, Any] = {} if ready is None else {"stream": ready}
            stack.enter_context(collective.joining(vector, **given))
