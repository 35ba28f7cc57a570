"""Methods of distributed training in simulated time, at any number of ranks.

The protocols are those that the engine runs; a discrete-event driver delivers their events, on a
machine described by LogGP's parameters. ``wagma simulate`` is the command for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.agreement import counted
from wagma.methods import METHODS
from wagma.methods.method import Method, load
from wagma.simulation import steps
from wagma.simulation.core import Simulation
from wagma.simulation.machine import FREE, MACHINES, Machine
from wagma.simulation.methods import Settings

if TYPE_CHECKING:  # it loads torch
    from wagma.simulation.learning import Learned
    from wagma.tasks.contract import Task

__all__ = ["FREE", "MACHINES", "Machine", "Result", "Settings", "simulate", "train"]


@dataclass(frozen=True)
class Result:
    """The results of a simulation.

    Attributes:
        ranks: number of ranks.
        made: int64 array of shape (ranks,): number of steps that each rank made.
        reached: int64 array of shape (ranks,): iteration number of each rank at the end; equal to
            `made` unless it skipped iterations.
        wall: seconds until the end of the last rank's last step, or of the simulation.
        ideal_wall: seconds that ranks which never wait need for as many steps.
        compute: float64 array of shape (ranks,): seconds of the rank's own steps.
        waited: float64 array of shape (ranks,): seconds that its calls took.
        staleness: int64 array of shape (ages,): see `core.Method`.
        timely_share: the share of the group averages that contained a rank's current vector; 1
            without any.
        left_out_share: the share of the batches of the steps made that `compute_limit` left out.
        updates: number of averages of several ranks that were completed, for methods that count
            them; else None.
        events, messages: number of simulated events and messages.
    """

    ranks: int
    made: np.ndarray
    reached: np.ndarray
    wall: float
    ideal_wall: float
    compute: np.ndarray
    waited: np.ndarray
    staleness: np.ndarray
    timely_share: float
    left_out_share: float
    updates: int | None
    events: int
    messages: int

    @property
    def throughput(self) -> float:
        """Steps per second, of all ranks together."""
        return self.made.sum() / self.wall

    @property
    def idle_share(self) -> float:
        """The share of the ranks' time in which they do not compute."""
        return 1 - self.compute.sum() / (self.ranks * self.wall)


def simulate(
    method: str | Method,
    step_times: np.ndarray,
    machine: Machine,
    settings: Settings,
    seconds: float | None = None,
) -> Result:
    """Simulate a method on ranks whose steps take these times.

    Args:
        method: one of `wagma.methods.METHODS`, or the name of one.
        step_times: float64 array of shape (steps, ranks): seconds, see `wagma.simulation.steps`.
        machine: the `Machine` that the ranks run on.
        settings: the job's settings.
        seconds: simulated seconds for which all ranks train; the steps of each must take at least
            as long. None: until all have made all steps, or have skipped iterations instead.

    Returns:
        A `Result`.

    Raises:
        ValueError: an argument is out of range.
    """
    step_times = np.asarray(step_times, dtype=np.float64)
    steps.check(step_times)
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"no method {method!r}: there are {', '.join(METHODS)}")
        method = METHODS[method]
    ranks = step_times.shape[1]
    limit = settings.compute_limit if method.option("compute_limit") else None
    begun, step_times = steps.begun_within(limit, step_times, settings.accumulate)
    driver = load(method.simulated)(settings, ranks)
    simulation = Simulation(driver, machine, step_times, seconds)
    simulation.run()
    made = np.arange(len(step_times))[:, None] < simulation.made
    if seconds is None:
        compute = np.where(made, step_times, 0).sum(axis=0)
        wall, ideal_wall = float(simulation.ended.max()), float(compute.max())
    else:
        compute = seconds - simulation.waited
        wall, ideal_wall = seconds, ideal_seconds(simulation.made, compute, seconds)
    if not math.isfinite(wall):
        raise ValueError(
            f"the simulated time of {method.name} on {counted(ranks, 'rank')} exceeds the range "
            "of a float"
        )
    return Result(
        ranks=ranks,
        made=simulation.made,
        reached=simulation.reached,
        wall=wall,
        ideal_wall=ideal_wall,
        compute=compute,
        waited=simulation.waited,
        staleness=np.trim_zeros(driver.staleness, "b"),
        timely_share=driver.timely / driver.calls if driver.calls else 1.0,
        left_out_share=left_out_share(begun[made], settings.accumulate),
        updates=driver.updates if driver.updates >= 0 else None,
        events=simulation.events,
        messages=simulation.messages,
    )


def left_out_share(begun: np.ndarray, parts: int) -> float:
    """Return the share of steps' parts that have not begun; 0 without a step."""
    return float(1 - begun.mean() / parts) if begun.size else 0.0


def ideal_seconds(made: np.ndarray, compute: np.ndarray, seconds: float) -> float:
    """Return the seconds that ranks which always compute need for the steps they made."""
    rates = np.divide(made, compute, out=np.zeros(len(made)), where=compute > 0)
    return float(made.sum() / rates.sum()) if made.any() else seconds


def train(
    task: Task | Path | str,
    algorithm: str,
    step_times: np.ndarray,
    machine: Machine,
    *,
    seconds: float | None = None,
    nbytes: int | None = None,
    seconds_per_work: float = 0.0,
    batched: bool = True,
    **settings: Any,
) -> Learned:
    """Train a model on simulated ranks whose steps take these times.

    The collectives and optimizers are those of a real training, and each rank has its own model,
    data and local optimizer: a method averages what it would average, when it would. A gradient is
    computed with the model that its rank has when the step begins.

    Args:
        task: what to train: a `wagma.tasks.contract.Task`, or the path of a script as that of
            ``wagma train --script``.
        algorithm: as on the command line, such as "wagma:group_size=4:late=conserving".
        step_times: float64 array of shape (steps, ranks): seconds, see `wagma.simulation.steps`.
        machine: the `Machine` that the ranks run on. Ranks of one node average in shared memory.
        seconds: simulated seconds for which all ranks train; the steps of each must take at least
            as long. None: until all have made all steps.
        nbytes: length in bytes that the model is to have for the network; None: its own.
        seconds_per_work: seconds that a step takes longer for each unit of its batches' work, such
            as a token, as the task's `work` tells it: so batches of unequal lengths take unequal
            times.
        batched: whether the gradients of ranks that compute at the same time may be computed at
            once, by `torch.func.vmap`, if the model allows it; they then differ by rounding from
            those of a real rank. False: where real trainings repeat bit for bit, this one has the
            same bits, in a machine of as many nodes.
        **settings: of the training, as the options of ``wagma train``: batch_size, accumulate,
            optimizer, lr, momentum, weight_decay, clip_norm, seed, evaluate_every,
            evaluate_every_seconds.

    Returns:
        A `wagma.simulation.learning.Learned`: the summary, as of ``wagma train``, with the
        evaluations over simulated time; the state of the ranks' mean model; every rank's losses.

    Raises:
        TypeError: there is no such setting.
        ValueError: the algorithm, or an option of it, is invalid.
        UsageError: steps take time by their work, which the task does not tell.
        NotImplementedError: the method cannot be trained in simulated time.
    """
    from wagma.simulation import learning, ranks  # not at the top: they load torch

    times = np.asarray(step_times, np.float64)
    job = ranks.Job(machine, times, seconds, nbytes, seconds_per_work=seconds_per_work)
    chosen = learning.settings_of(algorithm, job, settings)
    return learning.learn(chosen, learning.loaded(task, chosen), job, batched=batched)
