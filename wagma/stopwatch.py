"""The parts of a training step's time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Stopwatch:
    """The parts of a training step's time, in seconds; a sleep counts with its actual duration.

    The local optimizer's own step counts as compute: hooks on it mark where averaging, which may
    also precede it, ends and begins.

    Args:
        local_optimizer: the rank's own.
        clock: function that returns the time, in seconds.
    """

    def __init__(
        self,
        local_optimizer: torch.optim.Optimizer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.start()
        local_optimizer.register_step_pre_hook(lambda *_: self.averaged())
        local_optimizer.register_step_post_hook(lambda *_: self.computed())

    def start(self) -> None:
        """Begin a step."""
        self.compute = self.delay = self.average = 0.0
        self._last = self.clock()

    def computed(self, waited: float = 0.0) -> None:
        """Count the time since the last call as this rank's own work, except `waited` seconds."""
        self.compute += self._lap() - waited
        self.average += waited

    def delayed(self) -> None:
        """Count the time since the last call as an injected delay."""
        self.delay += self._lap()

    def averaged(self) -> None:
        """Count the time since the last call as averaging."""
        self.average += self._lap()

    def skip(self) -> None:
        """Do not count the time since the last call in the step."""
        self._lap()

    def _lap(self) -> float:
        last, self._last = self._last, self.clock()
        return self._last - last
