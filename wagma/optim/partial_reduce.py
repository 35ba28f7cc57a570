"""Partial Reduce: groups of the ranks that are ready first average (Miao et al., SIGMOD 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class PartialReduce(PeerAveraging):
    """Average the model in a group of the ranks that are ready first.

    A step waits until `group_size` ranks are ready, and so for no straggler. `Averaging` describes
    what all methods share. A model that is not finite is excluded from an average, and is replaced
    by it.

    Example:
        >>> optimizer = PartialReduce(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.ReadyGroupAllreduce` that averages.

    Source: that of `collectives.ReadyGroupAllreduce`.
    """

    collective: collectives.ReadyGroupAllreduce

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        group_size: int | None = None,
        weights: str = "constant",
        alpha: float = 0.5,
        missing: str = "nearest",
        history: int | None = None,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            group_size: P', number of ranks in a group, at least 2; None: 3, or all if there are
                fewer.
            weights: "constant": all members of a group have the same weight. "dynamic": the older
                an iteration, the smaller its weight, which the models of that iteration share, so
                that one old model may weigh more than each of several new ones. "dynamic-each": the
                older a model, the smaller its weight.
            alpha: α of both, from 0 to less than 1: the smaller, the lower the weight of older
                models.
            missing: of "dynamic": the model that gets the weight of iterations that no member has.
                "nearest": the nearest that a member has. "initial": the initial model, of which
                each rank keeps a copy; `collective.initial_share` is its share.
            history: T, number of recent groups in which the controller checks which ranks have met;
                None: enough.
            sync_every: number of a rank's steps from one average to the next.
            controller_rank: the rank whose engine forms groups.
            controller_only: whether that rank makes no steps. It takes part in the other collective
                methods, without weight: let it `join()`. `collective.participates` tells which
                ranks make steps.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {
                "group_size": group_size,
                "weights": weights,
                "alpha": alpha,
                "missing": missing,
                "history": history,
                "sync_every": sync_every,
                "controller_rank": controller_rank,
                "controller_only": controller_only,
            },
            comm=comm,
            **options,
        )

    def _make_collective(
        self, comm: MPI.Intracomm, **options: Any
    ) -> collectives.ReadyGroupAllreduce:
        return collectives.ReadyGroupAllreduce(comm, self.flat.vectors, **options)

    def report(self) -> dict[str, Any]:
        """Return ρ of the run's groups, with constant weights, or the initial model's mean share.

        ρ is known to the controller's rank: see `collectives.ReadyGroupAllreduce.rho`.
        """
        report: dict[str, Any] = {"rho": self.collective.rho}
        if self.collective.missing == "initial":
            report["initial_share_of_rank"] = self.collective.initial_share
        return report

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments, with defaults resolved."""
        names = (
            "group_size",
            "weights",
            "alpha",
            "missing",
            "history",
            "sync_every",
            "controller_rank",
            "controller_only",
        )
        return {name: getattr(self.collective, name) for name in names}
