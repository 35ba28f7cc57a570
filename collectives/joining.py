"""Joining several collectives at once."""

from __future__ import annotations

import contextlib

__all__ = ["join"]


def join(*pairs, stream=None) -> None:
    """Make no more calls of several collectives, but take part in others' until all have joined.

    A rank that waited in `join` of one collective could not take part in the calls of the next, in
    which ranks with more calls to make would wait for it: this joins all of them before it waits
    for any. All ranks name the same collectives in the same order.

    Args:
        pairs: a collective and its vector each, as the collective's own `join` takes it.
        stream: where vectors on CUDA devices are ready, and will be used next: one stream for all
            pairs, or a list of one for each, as the collective's own `join` takes it, or None; by
            default those that the arrays name.

    Raises:
        TypeError: numpy arrays have a stream.
        ValueError: there are not as many streams as pairs.

    Example:
        >>> collectives.join((generators, x), (discriminators, y))
    """
    streams = stream if isinstance(stream, (list, tuple)) else [stream] * len(pairs)
    if len(streams) != len(pairs):
        raise ValueError(f"stream has {len(streams)} streams, for {len(pairs)} vectors")
    with contextlib.ExitStack() as stack:
        for (collective, vector), ready in zip(pairs, streams):
            given = {} if ready is None else {"stream": ready}
            stack.enter_context(collective.joining(vector, **given))
