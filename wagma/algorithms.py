"""The algorithms that a job can train by, by the names that the command line has for them.

An algorithm adds itself to `ALGORITHMS`, and its class to `wagma.optim`. `REFERENCES` are torch's
own, for comparisons. Importing this module loads neither torch nor MPI nor numpy, so that --help
does not.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from mpi4py import MPI

    from wagma.optim.averaging import Averaging

__all__ = ["ALGORITHMS", "DEFAULT", "DEFAULTS", "REFERENCES", "Algorithm", "named"]

DEFAULT = "wagma"

# The command line's options that only some algorithms have use for, by their names in its
# settings, and what they are where an algorithm has use for them and they are not given.
DEFAULTS = {
    "group_size": None,
    "sync_period": 10,
    "groups": "changing",
    "wait": "nobody",
    "late": None,
    "wire_dtype": None,
    "transport": None,
    "overlap": False,
}


@dataclass(frozen=True)
class Algorithm:
    """One way to train.

    Attributes:
        optimizer: the name of its class in `module`.
        help: what it does, in one line.
        options: which of `DEFAULTS` it takes; the class has arguments of these names.
        bound: the least seconds that a job can take if averaging is free, from how long every
            rank's steps take, compute and injected delays, as a float64 array of shape (ranks,
            steps), and the job's settings: what counts is who waits for whom.
        module: where its class is.
    """

    optimizer: str
    help: str
    options: tuple[str, ...]
    bound: Callable[[np.ndarray, Mapping[str, Any]], float]
    module: str = "wagma.optim"

    def make(
        self,
        local: torch.optim.Optimizer,
        model: torch.nn.Module,
        comm: MPI.Comm,
        settings: argparse.Namespace,
    ) -> Averaging:
        """Make the optimiser that the command line asks for, around a local one; collective."""
        module = importlib.import_module(self.module)  # not at the top: it loads torch
        given = {name: getattr(settings, name) for name in self.options}
        return getattr(module, self.optimizer)(local, model, comm=comm, **given)


def all_wait_after(seconds: np.ndarray, period: int) -> float:
    """Return the time of steps after every `period`-th of which all ranks wait for each other.

    Args:
        seconds: of shape (ranks, steps).
        period: a period takes as long as its slowest rank's own steps.
    """
    import numpy as np  # not at the top: --help needs none

    starts = range(0, seconds.shape[1], period)
    return float(np.add.reduceat(seconds, starts, axis=1).max(axis=0).sum())


def every_period(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound where all ranks wait for each other every `sync_period` steps."""
    return all_wait_after(seconds, settings["sync_period"])


def every_step(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound where all ranks wait for each other in every step."""
    return all_wait_after(seconds, 1)


ALGORITHMS: dict[str, Algorithm] = {
    "wagma": Algorithm(
        "WAGMA",
        "models in changing groups that wait for nobody, all ranks every --sync-period steps",
        (
            "group_size",
            "sync_period",
            "groups",
            "wait",
            "late",
            "wire_dtype",
            "transport",
            "overlap",
        ),
        every_period,
    ),
    "allreduce": Algorithm(
        "Allreduce", "gradients over all ranks, in every step", ("transport",), every_step
    ),
    "local-sgd": Algorithm(
        "LocalSGD",
        "models over all ranks, every --sync-period steps",
        ("sync_period", "wire_dtype", "transport"),
        every_period,
    ),
}

REFERENCES: dict[str, Algorithm] = {
    "ddp": Algorithm(
        "DDP",
        "torch's DistributedDataParallel, over gloo: gradients, in every step",
        (),
        every_step,
        "wagma.references",
    ),
    "post-local-sgd": Algorithm(
        "PostLocalSGD",
        "torch's PostLocalSGDOptimizer, over gloo: models, every --sync-period steps",
        ("sync_period",),
        every_period,
        "wagma.references",
    ),
}


def named(name: str) -> Algorithm:
    """Return the algorithm or reference of this name."""
    return ALGORITHMS.get(name) or REFERENCES[name]
