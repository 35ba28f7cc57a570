"""The memory that a training in simulated time needs, and what the machine has."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch

from wagma.job import UsageError
from wagma.methods.method import load
from wagma.tasks import contract, local

__all__ = ["Need", "available"]

BASE = 300e6  # bytes besides the ranks': torch, the data, and the gradients of some ranks at once
RANK = 2e6  # bytes of a rank besides its vectors: its thread and its objects
ADAM = 2  # vectors of its state
MEMINFO = Path("/proc/meminfo")
LIMIT, USED = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "stat"))


class Need(NamedTuple):
    """What a training needs.

    Attributes:
        model: bytes of the model.
        vectors: vectors of this length that a rank of the method with the most has: the model, its
            gradient, the local optimizer's state, those of the collective, and two at the end, when
            the ranks' mean is evaluated.
        evaluations: how many evaluations wait at most for the slowest rank, each with a sum in
            double precision.
    """

    model: int
    vectors: int
    evaluations: int

    @classmethod
    def of(cls, settings: argparse.Namespace, task: contract.Task) -> Need:
        """Return the need of the largest of the algorithms."""
        model = task.model()
        values = [*model.parameters(), *model.buffers()]
        nbytes = sum(value.numel() * value.itemsize for value in values)
        state = state_vectors(settings, task)
        most = max(load(each.method.averager)._simulated_vectors for each in settings.algorithms)
        if settings.seconds is None:
            evaluations = settings.steps / (settings.evaluate_every or settings.steps)
        else:
            evaluations = settings.seconds / (settings.evaluate_every_seconds or settings.seconds)
        return cls(nbytes, 4 + state + most, math.ceil(evaluations))

    def total(self, ranks: int) -> float:
        """Return the bytes that so many ranks need."""
        kept = 2 * self.evaluations * self.model
        return BASE + ranks * (self.vectors * self.model + RANK) + kept

    def in_words(self, ranks: int) -> str:
        """Return a sentence about the memory of so many ranks."""
        return (
            f"memory: {self.total(ranks) / 1e9:.2f} GB for {ranks} ranks with {self.vectors} "
            f"vectors of {self.model / 1e6:.3g} MB each"
        )

    def check(self, ranks: int, free: float) -> None:
        """Raise UsageError if so many ranks need more than is free."""
        if self.total(ranks) > free:
            raise UsageError(
                f"{self.in_words(ranks)}, but {free / 1e9:.2f} GB are free: use fewer --ranks"
            )


def state_vectors(settings: argparse.Namespace, task: contract.Task) -> int:
    """Return how many vectors of the model's length the state of its local optimizer takes.

    It makes a step of a small model; an optimizer that does not accept that counts as Adam.
    """
    model = torch.nn.Linear(16, 16)
    try:
        optimizer = local.make(settings, task, model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except Exception:
        return ADAM
    state = [value for of in optimizer.state.values() for value in of.values()]
    elements = sum(each.numel() for each in state if torch.is_tensor(each) and each.ndim)
    return math.ceil(elements / sum(each.numel() for each in model.parameters()))


def available() -> float:
    """Return the bytes of memory that this process can still have."""
    lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    free = float(lines["MemAvailable"].split()[0]) * 1024
    if LIMIT.exists() and (text := LIMIT.read_text().strip()) != "max":
        stat = map(str.split, USED.read_text().splitlines())
        used = {name: float(value) for name, value in stat}
        kernel = used.get("kernel")
        if kernel is None:  # before Linux 5.18
            kernel = used.get("kernel_stack", 0) + used.get("slab", 0)
        free = min(free, float(text) - used["anon"] - kernel)
    return free
