"""One simulated rank's part in a training, and the evaluations of the ranks' mean model."""

from __future__ import annotations

import argparse
import copy
import itertools
from contextlib import AbstractContextManager, nullcontext
from statistics import mean
from typing import Any

import numpy as np
import torch

from wagma.evaluation import Kept, State, copy_of
from wagma.simulation.gradients import Gradient
from wagma.simulation.ranks import Communicator
from wagma.stopwatch import Thread, Used
from wagma.tasks import contract
from wagma.throttling import Limited
from wagma.trainer import Trainer

__all__ = ["Evaluations", "SimulatedTrainer"]


class Untimed(Thread):
    """A simulated rank, which uses no processor."""

    def __init__(self) -> None:
        pass

    def used(self) -> Used:
        return Used(0.0, 0.0)

    def faults(self) -> int:
        return 0

    def limited(self) -> Limited:
        return Limited(0.0, 0)


class SimulatedTrainer(Trainer):
    """A `Trainer` in simulated time: a step takes the time that the job gives it.

    A gradient is computed when its step ends, with the model that the rank had when it began; or
    before, if the step takes time by its work, which some tasks know only then.

    Args:
        settings, task, comm: those of `Trainer`.
        evaluations: evaluates the models that ranks keep.
        begun: int64 array of shape (steps, ranks): number of batches that begin in each step.
    """

    def __init__(
        self,
        settings: argparse.Namespace,
        task: contract.Task,
        comm: Communicator,
        evaluations: Evaluations,
        begun: np.ndarray,
    ) -> None:
        self.ranks, self.evaluations, self.begun = comm.ranks, evaluations, begun
        super().__init__(settings, task, comm, comm.ranks.now, Untimed())  # type: ignore[arg-type]
        evaluations.tests[comm.rank] = self.test

    def compute_gradient(self, step: int, batches: list[Any]) -> tuple[float, int]:
        """Compute for the time of a step, which includes its delay."""
        count = len(batches)
        if self.limited:
            count = int(self.begun[min(step, len(self.begun) - 1), self.rank])
        work, longer = Gradient(self, batches[:count]), 0.0
        if self.ranks.job.seconds_per_work:
            work.compute()
            longer = self.ranks.job.seconds_per_work * self.task.work_of(batches)
        self.ranks.compute(self.rank, work, longer)
        self.stopwatch.computed()
        loss = work.compute()
        if self.limited:
            self.averager.computed = count
            self.averager.left_out += len(batches) - count
            loss /= count
        return loss, count

    def until_all_end(self) -> AbstractContextManager[None]:
        """Return a block without an effect: all ranks end at the same time, or step."""
        return nullcontext()

    def keep(self, models: list[Kept]) -> None:
        """Have models evaluated once all ranks have kept theirs."""
        for each in models:
            self.evaluations.add(len(self.kept), each, self)
            self.kept.append(each._replace(state={}))


class Sum:
    """The sum of the models that ranks have kept so far, for one evaluation.

    Attributes:
        steps: the number of steps that each had made.
        elapsed_s: the time at which the last of them kept its model.
        state: the sum of the floating-point tensors, in double precision; of others the last.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.elapsed_s = 0.0
        self.state: State = {}

    def add(self, kept: Kept) -> None:
        """Add a model."""
        self.steps.append(kept.steps)
        self.elapsed_s = max(self.elapsed_s, kept.elapsed_s)
        for name, value in kept.state.items():
            if value.is_floating_point() and name in self.state:
                self.state[name] += value
            else:
                self.state[name] = value.double() if value.is_floating_point() else value

    def mean(self, like: State) -> State:
        """Return the mean model, with the dtypes of `like`."""
        count = len(self.steps)
        return {
            name: (value / count).to(like[name].dtype) if value.is_floating_point() else value
            for name, value in self.state.items()
        }


class Evaluations:
    """Evaluates the mean of the models that all ranks which train have kept, when the last has.

    Memory: a model, and a sum in double precision for each evaluation that not all ranks have
    reached.

    Args:
        task: the task that is trained.
        ranks: the number of ranks.
        trainers: the number of those which train: one may only run a controller.

    Attributes:
        tests: each rank's test batches.
        results: the evaluations, as those of `wagma.evaluation.evaluate_kept`.
    """

    def __init__(self, task: contract.Task, ranks: int, trainers: int) -> None:
        self.task, self.trainers = task, trainers
        self.tests: list[Any] = [()] * ranks
        self.results: list[dict[str, Any]] = []
        self._sums: dict[int, Sum] = {}
        self._model: torch.nn.Module | None = None

    def add(self, number: int, kept: Kept, trainer: SimulatedTrainer) -> None:
        """Add a rank's model to the evaluation of this number; evaluate if it is the last one."""
        total = self._sums.setdefault(number, Sum())
        total.add(kept)
        if len(total.steps) == self.trainers:
            del self._sums[number]
            self.results.append(self._evaluate(total, kept.state, trainer.model))

    def finish(self, kept: Kept, trainer: SimulatedTrainer) -> State | None:
        """Add a rank's last model; return the mean on the rank that is the last one."""
        total = self._sums.setdefault(-1, Sum())
        total.add(kept)
        if len(total.steps) < self.trainers:
            return None
        del self._sums[-1]
        state = total.mean(kept.state)
        self.results.append(self._evaluate(total, kept.state, trainer.model))
        return state

    def _evaluate(self, total: Sum, like: State, model: torch.nn.Module) -> dict[str, Any]:
        if self._model is None:
            self._model = copy.deepcopy(model)
        self._model.load_state_dict(total.mean(like))
        once = {id(test): test for test in self.tests}  # ranks may share one
        batches = itertools.chain.from_iterable(once.values())
        metrics = contract.all_ranks([contract.evaluate(self.task, self._model, batches)])
        return {"step": mean(total.steps), "elapsed_s": total.elapsed_s, **metrics}


def last_of(trainer: SimulatedTrainer, steps: int, seconds: float | None) -> Kept:
    """Return a rank's model at the end of the training."""
    at = trainer.elapsed if seconds is None else seconds
    return Kept(steps, at, copy_of(trainer.model))
