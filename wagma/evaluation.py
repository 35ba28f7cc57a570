"""Evaluation of the averaged model, at the end of a training and during it.

During a training models are only copied; they are averaged and tested after it, so that evaluations
take none of its time and no rank waits for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wagma.tasks import contract

if TYPE_CHECKING:  # importing MPI initializes it
    from mpi4py import MPI

    from wagma.trainer import Trainer

State = dict[str, Any]  # tensors, and what modules add by get_extra_state


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
    return {
        name: value.to("cpu", copy=True) if torch.is_tensor(value) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }


def floating_of(state: State) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors of a state."""
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


def bytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of a model's floating-point tensors."""
    return sum(value.nbytes for value in floating_of(model.state_dict()).values())


def mean_over_ranks(state: State, comm: MPI.Comm, counts: bool = True) -> State:
    """Return the mean of the states of the ranks whose `counts` is true; collective.

    What is no floating-point tensor is returned unchanged.
    """
    from mpi4py import MPI

    floating = floating_of(state)
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

    The ranks' results are combined later, once all have some: a signal may arrive in between.
    """
    with trainer.averager.averaged():
        measured = contract.evaluate(trainer.task, trainer.model, trainer.test)
        return copy_of(trainer.model), measured


def evaluate_kept(
    trainer: Trainer, comm: MPI.Comm, is_asked: Callable[[], object]
) -> tuple[list[dict], bool]:
    """Evaluate the means of the models that all ranks that train have kept; collective.

    The model is changed.

    Args:
        trainer, comm: This rank's trainer, and all ranks.
        is_asked: Returns whether this rank is asked to stop; if any is, all do.

    Returns:
        On rank 0, for each: step, the number of steps made, as a mean over the ranks; elapsed_s,
        the time at which the last rank had made them, or the common time at which ranks kept their
        models; and the task's metrics. And whether all have been evaluated.
    """
    results: list[dict] = []
    # A faster rank has kept none for the last of the other ranks' times.
    counts = comm.allgather(len(trainer.kept) if trainer.trains else None)
    number = min(count for count in counts if count is not None)
    nothing = [] if trainer.trains else number * [Kept(0, 0.0, copy_of(trainer.model))]
    for kept in (nothing or trainer.kept)[:number]:
        if any(comm.allgather(bool(is_asked()))):
            return results, False
        trainer.model.load_state_dict(mean_over_ranks(kept.state, comm, trainer.trains))
        measured = contract.evaluate(trainer.task, trainer.model, trainer.test)
        everyone = comm.gather((kept.steps, kept.elapsed_s, measured) if trainer.trains else None)
        if comm.rank == 0:
            steps, elapsed, means = zip(*filter(None, everyone))
            metrics = contract.all_ranks(means)
            results.append({"step": mean(steps), "elapsed_s": max(elapsed), **metrics})
    return results, True
