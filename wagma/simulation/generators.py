"""The generators that a program may draw from, of which each simulated rank has its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from numpy.random import MT19937, mtrand

__all__ = ["Generators", "states", "undrawn"]


class Generators:
    """The generators of one program: torch's, numpy's and Python's, first with the current states.

    numpy's is an object of its own, which is exchanged: to copy its state takes much longer.
    """

    def __init__(self) -> None:
        self.numpy = MT19937()
        self.numpy.state = mtrand.get_bit_generator().state  # type: ignore[assignment]
        self.save()

    def save(self) -> None:
        """Save the states, while the program draws from these generators."""
        self.torch, self.python = torch.get_rng_state(), random.getstate()

    def restore(self) -> None:
        """Let the program draw from these generators, from where they were saved."""
        torch.set_rng_state(self.torch)
        mtrand.set_bit_generator(self.numpy)
        random.setstate(self.python)


def states() -> tuple[bytes, str, object]:
    """Return what changes with every draw from the current generators."""
    numpy = repr(mtrand.get_bit_generator().state)
    return torch.get_rng_state().numpy().tobytes(), numpy, random.getstate()


@contextmanager
def undrawn() -> Iterator[None]:
    """Undo the block's drawing."""
    bits = mtrand.get_bit_generator()
    before = Generators()
    try:
        yield
    finally:
        before.restore()
        bits.state = before.numpy.state
        mtrand.set_bit_generator(bits)
