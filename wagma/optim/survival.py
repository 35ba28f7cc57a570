"""How an optimizer goes on after the end of another rank's process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collectives.agreement import counted, name_ranks, raise_collectively
from wagma.optim.last_models import LastModels

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

__all__ = ["Recovery"]


@dataclass(frozen=True)
class Recovery:
    """What a rank is told after others' processes have ended, and training goes on without them.

    Attributes:
        dead: ranks that have died, as they were numbered before.
        counted: of these, the ranks whose last published model is in the average from which all go
            on: each counts once more, and then no more.
        size_before, size: the number of ranks, before and now.
        version: that of the next average.
        behind: how many steps this rank makes without an average, to get where others are.
        lost: what has been lost, in words.
        seconds: time in seconds from when this rank noticed until it went on.
    """

    dead: tuple[int, ...]
    counted: tuple[int, ...]
    size_before: int
    size: int
    version: int
    behind: int
    lost: str
    seconds: float

    def __str__(self) -> str:
        have = "has" if len(self.dead) == 1 else "have"
        return (
            f"{name_ranks(list(self.dead))} of {self.size_before} {have} died: "
            f"{counted(self.size, 'rank')} went on from the average of all models after "
            f"{self.seconds:.2f} s, at version {self.version}; lost: {self.lost}"
        )


class Facts(NamedTuple):
    """What ranks tell each other: who they are, and how far each one is."""

    identity: int
    steps: int
    done: int
    total: float
    joins: int
    completed: int


def estates(comm: MPI.Intracomm, last: LastModels, dead: list[int]) -> dict[int, tuple[int, int]]:
    """Return which rank counts the last model of each dead one, and of which step that is.

    It is collective; a dead rank whose memory no rank has mapped is not in the dict, nor one whose
    model is not finite.
    """
    known = {each: kept[0] for each in dead if (kept := last.of(each)) and are_finite(kept[1])}
    readers: dict[int, tuple[int, int]] = {}
    for rank, of_rank in enumerate(comm.allgather(known)):
        for each, step in of_rank.items():
            readers.setdefault(each, (rank, step))
    return readers


def describe_lost(members: list[int], dead: list[int], readers: dict[int, tuple[int, int]]) -> str:
    """Return in words what the dead ranks may have done that is in no model."""
    parts = []
    for each in dead:
        name = f"of rank {members.index(each)}"
        if each in readers:
            parts.append(f"{name}, at most the step after its step {readers[each][1]}")
        else:
            parts.append(f"{name}, its changes that no other rank had averaged")
    return "; ".join(parts)


def are_finite(vectors: list[torch.Tensor]) -> bool:
    """Return whether all numbers of these vectors are finite."""
    return all(bool(vector.isfinite().all()) for vector in vectors)


@torch.no_grad()
def average(
    comm: MPI.Intracomm, memory: list[torch.Tensor], models: list[list[torch.Tensor]]
) -> None:
    """Overwrite vectors by the mean of all ranks' models, the same on all ranks; collective.

    Models that are not finite do not count; if none is finite, the vectors are left as they are.
    Half-precision vectors are added in float32. Memory: one more vector.

    Args:
        comm: the ranks.
        memory: this rank's vectors.
        models: lists of vectors like these that this rank contributes, any number.
    """
    from mpi4py import MPI

    models = [each for each in models if are_finite(each)]
    count = comm.allreduce(len(models))
    if count == 0:
        return
    for k, vector in enumerate(memory):
        wide = torch.promote_types(vector.dtype, torch.float32)
        total = torch.zeros(vector.numel(), dtype=wide)
        for each in models:
            total += each[k].cpu()
        array = total.numpy()
        comm.Reduce(MPI.IN_PLACE if comm.rank == 0 else array, array, root=0)
        total /= count
        comm.Bcast(array, root=0)
        vector.copy_(total)


def equalize(
    comm: MPI.Intracomm, optimizers: Sequence[torch.optim.Optimizer], done: list[int]
) -> None:
    """Give ranks that have made fewer steps the local optimizers' states of one with most.

    Args:
        comm: the ranks; it is collective.
        optimizers: the local ones.
        done: the steps that each rank has made.

    Raises:
        Exception: a state cannot be pickled; on all ranks.
    """
    most = max(done)
    if min(done) == most:
        return
    root = done.index(most)
    states: Any = None
    error: Exception | None = None
    if comm.rank == root:
        try:
            states = pickle.dumps([each.state_dict() for each in optimizers])
        except Exception as problem:
            error = problem
    raise_collectively(comm, error)
    states = comm.bcast(states, root=root)
    if done[comm.rank] < most:
        for optimizer, state in zip(optimizers, pickle.loads(states), strict=True):
            optimizer.load_state_dict(state)
