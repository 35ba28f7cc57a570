"""Joining several collectives at once."""

from __future__ import annotations

import contextlib

__all__ = ["join"]


def join(*pairs) -> None:
    """Make no more calls of several collectives, but take part in others' until all have joined.

    A rank that waited in `join` of one collective could not take part in the calls of the next, in
    which ranks with more calls to make would wait for it: this joins all of them before it waits
    for any. All ranks name the same collectives in the same order.

    Args:
        pairs: a collective and its vector each, as the collective's own `join` takes it.

    Example:
        >>> collectives.join((generators, x), (discriminators, y))
    """
    with contextlib.ExitStack() as stack:
        for collective, vector in pairs:
            stack.enter_context(collective.joining(vector))
