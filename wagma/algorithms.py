"""The algorithms that a job can train by, by the names that the command line has for them.

An algorithm adds itself to `ALGORITHMS`, and its class to `wagma.optim`. `REFERENCES` are torch's
own, for comparisons. Importing this module loads neither torch nor MPI nor numpy, so that --help
does not.
"""

from __future__ import annotations

import argparse
import heapq
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
    "trigger": "solo",
    "transport": None,
    "overlap": False,
    "clock": "neighbors",
    "neighbors": 1,
    "mode": "bsp",
    "backups": 0,
}


@dataclass(frozen=True)
class Algorithm:
    """One way to train.

    Attributes:
        optimizer: the name of its class in `module`.
        help: what it does, in one line.
        options: which of `DEFAULTS` it takes; the class has arguments of these names.
        seeded: whether it draws something, and the class takes the job's seed.
        bound: the least seconds that a job can take if averaging is free, from how long every
            rank's steps take, compute and injected delays, as a float64 array of shape (ranks,
            steps), and the job's settings: what counts is who waits for whom.
        module: where its class is.
    """

    optimizer: str
    help: str
    options: tuple[str, ...]
    bound: Callable[[np.ndarray, Mapping[str, Any]], float]
    seeded: bool = False
    module: str = "wagma.optim"

    def make(
        self,
        local: torch.optim.Optimizer,
        model: torch.nn.Module,
        comm: MPI.Comm,
        settings: argparse.Namespace,
    ) -> Averaging:
        """Make the optimizer that the command line asks for, around a local one; collective."""
        module = importlib.import_module(self.module)  # not at the top: it loads torch
        given = {name: getattr(settings, name) for name in self.options}
        if self.seeded:
            given["seed"] = settings.seed
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


def nobody(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound where no rank waits for another."""
    return float(seconds.sum(axis=1).max())


def neighbors(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound where a step waits for the two neighbors in a ring to have begun theirs."""
    import numpy as np  # not at the top: --help needs none

    if settings["clock"] == "global":
        return all_wait_after(seconds, 1)
    ended = np.zeros(len(seconds))
    for step in seconds.T:
        ended = np.maximum.reduce([ended + step, np.roll(ended, 1), np.roll(ended, -1)])
    return float(ended.max())


def pushes(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound where a step waits for that of the ranks that push to this one."""
    import numpy as np  # not at the top: --help needs none

    size, steps = seconds.shape
    hops = [1 << i for i in range((size - 1).bit_length())]
    ended = np.zeros(size)
    for step in range(steps):
        pushed = ended + seconds[:, step]
        first = step * settings["neighbors"]
        now = [hops[(first + j) % len(hops)] for j in range(settings["neighbors"]) if hops]
        ended = np.maximum.reduce([pushed, *(np.roll(pushed, hop) for hop in now)])
    return float(ended.max())


def served(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound of a parameter server."""
    if settings["mode"] in ("asp", "hete"):
        return nobody(seconds, settings)
    if settings["mode"] == "bsp":
        return all_wait_after(seconds, 1)
    return rounds(seconds, len(seconds) - settings["backups"])


def rounds(seconds: np.ndarray, enough: int) -> float:
    """Return the bound where a step waits for that of so many ranks, or none if it was too late.

    It is what happens if averaging takes no time. Who comes too late depends on all steps: longer
    ones may, now and then, make it shorter.
    """
    size, steps = seconds.shape
    made = [0] * size
    began = [0] * size  # the round that each rank's step is part of
    events = [(float(seconds[rank, 0]), rank) for rank in range(size)]
    heapq.heapify(events)
    waiting, active, number, time = [], size, 0, 0.0

    def begin(rank):
        nonlocal active
        made[rank] += 1
        began[rank] = number
        if made[rank] == steps:
            active -= 1
        else:
            heapq.heappush(events, (time + float(seconds[rank, made[rank]]), rank))

    while events:
        time, rank = heapq.heappop(events)
        if began[rank] < number:
            begin(rank)
        else:
            waiting.append(rank)
        while waiting and len(waiting) >= min(enough, active):
            number += 1
            released, waiting = waiting, []
            for each in released:
                begin(each)
    return time


def when_triggered(seconds: np.ndarray, settings: Mapping[str, Any]) -> float:
    """Return the bound where a step begins as eager-SGD's `trigger` says, and all wait in periods.

    With "majority" a rank that comes before the one drawn for the step waits for that.
    """
    import numpy as np  # not at the top: --help needs none

    from collectives.protocols.wait_avoiding import drawn

    if settings["trigger"] == "solo":
        return every_period(seconds, settings)
    ranks, steps = seconds.shape
    at = np.zeros(ranks)
    for step in range(steps):
        at += seconds[:, step]
        synchronous = (step + 1) % settings["sync_period"] == 0
        at = np.maximum(at, at.max() if synchronous else at[drawn(0, step, ranks)])
    return float(at.max())


ALGORITHMS: dict[str, Algorithm] = {
    "wagma": Algorithm(
        "WAGMA",
        "models in changing groups that wait for nobody, all of them every --sync-period",
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
    "eager-sgd": Algorithm(
        "EagerSGD",
        "gradients, over all ranks as --trigger says; models, every --sync-period steps",
        ("trigger", "sync_period", "transport"),
        when_triggered,
    ),
    "d-psgd": Algorithm(
        "DPSGD", "models with both neighbors in a ring", ("clock", "transport"), neighbors
    ),
    "sgp": Algorithm(
        "SGP",
        "shares of models pushed to --neighbors ranks, other ones in every step",
        ("neighbors", "transport"),
        pushes,
    ),
    "ad-psgd": Algorithm(
        "ADPSGD",
        "models of random pairs, while they compute; nobody waits",
        ("transport",),
        nobody,
        seeded=True,
    ),
    "parameter-server": Algorithm(
        "ParameterServer",
        "one model on rank 0, to which all send updates, as --mode says",
        ("mode", "backups", "transport"),
        served,
    ),
}

REFERENCES: dict[str, Algorithm] = {
    "ddp": Algorithm(
        "DDP",
        "torch's DistributedDataParallel, over gloo: gradients, in every step",
        (),
        every_step,
        module="wagma.references",
    ),
    "post-local-sgd": Algorithm(
        "PostLocalSGD",
        "torch's PostLocalSGDOptimizer, over gloo: models, every --sync-period steps",
        ("sync_period",),
        every_period,
        module="wagma.references",
    ),
}


def named(name: str) -> Algorithm:
    """Return the algorithm or reference of this name."""
    return ALGORITHMS.get(name) or REFERENCES[name]
