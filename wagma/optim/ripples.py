"""Ripples: groups made by a generator, or a schedule, average models (Luo et al., 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack

GROUP_SIZE = 3  # the paper's (section 7.1.3)


class Ripples(PeerAveraging):
    """Average the model in a group made by a generator after every step, which waits for the group.

    The generator leaves out ranks that are too slow for the others; a schedule can be used instead.
    `Averaging` describes what all methods share.

    Example:
        >>> optimizer = Ripples(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.GeneratedGroupAllreduce` that averages; its `alone` counts the
            steps in which this rank averaged with no other.

    Source: that of `collectives.GeneratedGroupAllreduce`.
    """

    collective: collectives.GeneratedGroupAllreduce

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        groups: str = "smart",
        group_size: int | None = None,
        threshold: int = 4,
        ranks_per_node: int | None = None,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        seed: int = 0,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            groups: "smart": all ranks that are not waiting are divided into groups; the paper's
                best generator, with slow ranks and without. "random": every step makes a group of
                random ranks. "buffered": a step whose rank is in no group makes one. "static": a
                schedule.
            group_size: ranks per group, at least 2; None: 3.
            threshold: C_thres of "smart": a rank that is this many steps behind is left out.
            ranks_per_node: of "smart" and "static"; None: as MPI reports.
            sync_every: number of a rank's steps from one average to the next.
            controller_rank: the rank whose engine generates groups.
            controller_only: whether that rank makes no steps, as in `PartialReduce`.
            seed: seed of the groups drawn.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
            RuntimeError: another one with a generator is open in this process; on all ranks.
        """
        super().__init__(
            optimizer,
            model,
            {
                "groups": groups,
                "group_size": GROUP_SIZE if group_size is None else group_size,
                "threshold": threshold,
                "ranks_per_node": ranks_per_node,
                "sync_every": sync_every,
                "controller_rank": controller_rank,
                "controller_only": controller_only,
                "seed": seed,
            },
            comm=comm,
            **options,
        )

    def _make_collective(
        self, comm: MPI.Intracomm, *, seed: int, **options: Any
    ) -> collectives.GeneratedGroupAllreduce:
        self._seed = seed
        return collectives.GeneratedGroupAllreduce(comm, self.flat.vectors, seed=seed, **options)

    def report(self) -> dict[str, Any]:
        """Return how many steps averaged with no other rank, and which ranks this one has met."""
        met = self.collective.met if self.collective.participates else None
        return {"alone_of_rank": self.collective.alone, "met": met}

    @property
    def settings(self) -> dict[str, Any]:
        """How groups are made, the seed, and the ranks per node."""
        names = (
            "groups",
            "group_size",
            "threshold",
            "ranks_per_node",
            "sync_every",
            "controller_rank",
            "controller_only",
        )
        return {**{name: getattr(self.collective, name) for name in names}, "seed": self._seed}
