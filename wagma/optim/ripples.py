"""Ripples: groups made by a generator, or a schedule, average models (Luo et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack  # torch's, too

import collectives
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given

GROUP_SIZE = 3  # the paper's (section 7.1.3)


class Ripples(Averager):
    """Average the model in a group made by a generator after every step, which waits for the group.

    The generator leaves out ranks that are too slow for the others; a schedule can be used instead.
    `Averager` describes what all methods share.

    Attributes:
        collective: the `collectives.GeneratedGroupAllreduce` that averages; its `alone` counts the
            steps in which this rank averaged with no other.

    Source: that of `collectives.GeneratedGroupAllreduce`.
    """

    _is_weighted = False
    _makes = collectives.GeneratedGroupAllreduce
    collective: collectives.GeneratedGroupAllreduce

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        groups: str = "smart",
        group_size: int | None = None,
        threshold: int = 4,
        ranks_per_node: int | None = None,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        seed: int = 0,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            groups: "random": every step makes a group of random ranks. "buffered": a step whose
                rank is in no group makes one. "smart": all ranks that are not waiting are divided
                into groups; the paper's best generator, with slow ranks and without. "static": a
                schedule.
            group_size: ranks per group, at least 2; None: 3.
            threshold: C_thres of "smart": a rank that is this many steps behind is left out.
            ranks_per_node: ranks on a node, for "smart" and "static"; None: as MPI reports.
            sync_every: number of a rank's steps from one average to the next.
            controller_rank: the rank whose engine generates groups.
            controller_only: whether that rank makes no steps, as in `PartialReduce`.
            seed: seed of the groups drawn.
            **options: see `AveragerOptions`.

        Raises:
            TypeError, ValueError: as `Averager` does.
            RuntimeError: another one with a generator is open in this process; on all ranks.
        """
        group_size = GROUP_SIZE if group_size is None else group_size
        super().__init__(model, optimizer, given(locals()), **options)

    def report(self) -> dict[str, Any]:
        """Return how many steps averaged with no other rank, and which ranks this one has met."""
        met = self.collective.met if self.collective.participates else None
        return {"alone_of_rank": self.collective.alone, "met": met}
