"""How an optimizer goes on after the end of another rank's process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collectives.agreement import counted, name_ranks, raise_collectively
from collectives.survival import Survivors
from wagma.optim.last_models import LastModels

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

__all__ = ["Recovery", "Survival"]


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


class Survival:
    """One rank's part in going on without others.

    Args:
        comm: communicator of all ranks; construction is collective.
        memory: vectors that may be lost with a rank; []: they are the same on all ranks.
        told: is called with each `Recovery`.

    Attributes:
        survivors: the ranks that go on.
        members: who they are: their ranks at first, by their ranks now.
        identity: this rank at first.
        size_at_first: how many there were.
        lets_through: whether errors in calls are not for the call itself to cope with.
        steps: the steps of this rank, with the one whose average it is in.
        done: those whose average it has.
        behind: the steps that it makes without an average, to get where others are.
        joins: how many `join` blocks it has left; `joined`, how many any rank has.
        completed: how many averages of all models outside of steps; `others_completed`, how many
            any rank had at the last recovery.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: list[torch.Tensor],
        told: Callable[[Recovery], object] | None,
    ):
        self.survivors = Survivors(comm)
        self.members = self._living = list(range(comm.size))
        self.size_at_first, self.identity = comm.size, comm.rank
        self.lets_through = False
        self.told = told
        self.last = LastModels(self.survivors.comm, memory)
        self.steps = self.done = self.behind = 0
        self.joins = self.joined = 0
        self.completed = self.others_completed = 0
        self.publish(memory)

    def publish(self, memory: list[torch.Tensor]) -> None:
        """Keep a copy of the rank's vectors that outlives it."""
        self.last.publish(memory, self.steps)

    def begin_step(self, memory: list[torch.Tensor]) -> bool:
        """Note a step, whose average comes next; return False if the others have made it."""
        self.steps += 1
        self.publish(memory)
        if self.behind == 0:
            return True
        self.behind -= 1
        self.done = self.steps
        return False

    def go_to(self, step: int) -> None:
        """Note that all ranks are at the same step."""
        self.steps = self.done = step
        self.behind = 0

    def gather(self, total: float) -> tuple[list[Facts], list[int]]:
        """Return what all ranks tell, and who has died; collective."""
        mine = Facts(self.identity, self.steps, self.done, total, self.joins, self.completed)
        facts = self.survivors.comm.allgather(mine)
        self._living = [each.identity for each in facts]
        return facts, [each for each in self.members if each not in self._living]

    def settle(self) -> None:
        """Note that all that live have gone on, so that no rank of before is asked about again."""
        self.members = self._living

    def estates(self, dead: list[int]) -> dict[int, tuple[int, int]]:
        """Return which rank counts the last model of each dead one, and of which step that is.

        It is collective; a dead rank whose memory no rank has mapped is not in the dict, nor one
        whose model is not finite.
        """
        known = {
            each: last[0] for each in dead if (last := self.last.of(each)) and are_finite(last[1])
        }
        readers: dict[int, tuple[int, int]] = {}
        for rank, of_rank in enumerate(self.survivors.comm.allgather(known)):
            for each, step in of_rank.items():
                readers.setdefault(each, (rank, step))
        return readers

    def rank_before(self, identity: int) -> int:
        """Return the number of a rank until now."""
        return self.members.index(identity)

    def describe_lost(self, dead: list[int], readers: dict[int, tuple[int, int]]) -> str:
        """Return in words what the dead ranks may have done that is in no model."""
        parts = []
        for each in dead:
            name = f"of rank {self.rank_before(each)}"
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


def equalize(comm: MPI.Intracomm, optimizer: torch.optim.Optimizer, done: list[int]) -> None:
    """Give ranks that have made fewer steps the local optimizer's state of one with most.

    Args:
        comm: the ranks; it is collective.
        optimizer: the local optimizer.
        done: the steps that each rank has made.

    Raises:
        Exception: the state cannot be pickled; on all ranks.
    """
    most = max(done)
    if min(done) == most:
        return
    root = done.index(most)
    state: Any = None
    error: Exception | None = None
    if comm.rank == root:
        try:
            state = pickle.dumps(optimizer.state_dict())
        except Exception as problem:
            error = problem
    raise_collectively(comm, error)
    state = comm.bcast(state, root=root)
    if done[comm.rank] < most:
        optimizer.load_state_dict(pickle.loads(state))
