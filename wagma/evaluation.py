"""Evaluation of the averaged model, at the end of a training and during it.

During a training models are only copied; they are averaged and tested when it is over, so that
evaluations take none of its time and no rank waits for them.
"""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

import torch
from mpi4py import MPI

from wagma.job import Signals
from wagma.tasks import contract

if TYPE_CHECKING:
    from wagma.train import Trainer

State = dict[str, torch.Tensor]


class Kept(NamedTuple):
    """A rank's model at some time of the training.

    Args:
        steps: Number of steps that the rank had made.
        elapsed_s: Seconds since the training began, without evaluations.
        state: A copy of the model's state.
    """

    steps: int
    elapsed_s: float
    state: State


def copy_of(model: torch.nn.Module) -> State:
    """Return a copy of the model's state on the CPU, wherever the model is."""
    return {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}


def mean_over_ranks(state: State, comm: MPI.Comm, counts: bool = True) -> State:
    """Return the mean of those ranks' states that count; collective.

    What is no floating-point number stays.
    """
    floating = {name: value for name, value in state.items() if value.is_floating_point()}
    flat = torch.cat([value.detach().double().flatten() for value in floating.values()]).numpy()
    flat *= counts
    comm.Allreduce(MPI.IN_PLACE, flat)
    flat /= comm.allreduce(int(counts))
    parts = torch.from_numpy(flat).split([value.numel() for value in floating.values()])
    means = {
        name: part.view(value.shape).to(value.dtype)
        for (name, value), part in zip(floating.items(), parts)
    }
    return {**state, **means}


def evaluate(trainer: Trainer) -> tuple[State, contract.Means]:
    """Return a copy of the averaged model's state, and its test results on this rank; collective.

    How ranks' results are put together is left for when all have some: a signal may come between.
    """
    with trainer.optimizer.averaged():
        measured = contract.evaluate(trainer.task, trainer.model, trainer.test)
        return copy_of(trainer.model), measured


def evaluate_kept(trainer: Trainer, comm: MPI.Comm, signals: Signals) -> list[dict]:
    """Return how good the means of the models were that all ranks kept that train; collective.

    Where a signal has come on any rank, all stop. The model is not as it was afterwards.

    Returns:
        On rank 0, for each: step, how many had been made, by the mean rank; elapsed_s, when the
        last rank had made them, or the time that all ranks have kept their models of; and the
        task's metrics.
    """
    results = []
    # A rank that was faster has kept none for the last of other ranks' times.
    counts = comm.allgather(len(trainer.kept) if trainer.trains else None)
    number = min(count for count in counts if count is not None)
    nothing = [] if trainer.trains else number * [Kept(0, 0.0, copy_of(trainer.model))]
    for kept in (nothing or trainer.kept)[:number]:
        if any(comm.allgather(signals.received)):
            break
        trainer.model.load_state_dict(mean_over_ranks(kept.state, comm, trainer.trains))
        measured = contract.evaluate(trainer.task, trainer.model, trainer.test)
        everyone = comm.gather((kept.steps, kept.elapsed_s, measured) if trainer.trains else None)
        if comm.rank == 0:
            steps, elapsed, means = zip(*filter(None, everyone))
            metrics = contract.all_ranks(means)
            results.append({"step": mean(steps), "elapsed_s": max(elapsed), **metrics})
    return results
