"""Partial Reduce: groups of who is ready first average models (Miao et al., SIGMOD 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI


class PartialReduce(PeerAveraging):
    """Average the model with those of the first ranks that are ready, too.

    A step waits until `group_size` ranks have made theirs, whoever they are, and so for no slow
    one. What holds for all methods is said in `Averaging`; a model that is not finite is left out
    of an average, and gets it.

    Example:
        >>> optimizer = PartialReduce(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.ReadyGroupAllreduce` that averages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        group_size: int | None = None,
        *,
        weights: str = "constant",
        alpha: float = 0.5,
        missing: str = "nearest",
        history: int | None = None,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        comm: MPI.Intracomm | None = None,
        engine: str | None = None,
        transport: str | None = None,
        stall: float | None = None,
        abort: float | None = None,
        log_level: str | None = None,
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            group_size: P', how many ranks average, from 2 on; None: 3, or all if they are fewer.
            weights: "constant": all members of a group count alike. "dynamic": the less the older
                their models are.
            alpha: α of "dynamic": from 0 to less than 1, the smaller the less older models count.
            missing: of "dynamic": what iterations count that no member has. "nearest": for the
                nearest that one has. "initial": for the initial model, of which each rank keeps a
                copy; `collective.initial_share` says how much.
            history: T, of how many groups is looked at who has met whom; None: enough.
            sync_every: steps from one average of a rank to its next.
            controller_rank: the rank whose engine forms groups.
            controller_only: whether that rank makes no steps: it calls what else is collective, and
                its model does not count. Let it `join()`; `collective.participates` says who steps.
            engine, transport, stall, abort, log_level: as for `collectives.GroupAllreduce`.

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
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    def _make_collective(self, comm, **options):
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
        """Its arguments, those that were not given as they were chosen."""
        names = ("group_size", "weights", "alpha", "missing", "history")
        names += ("sync_every", "controller_rank", "controller_only")
        return {name: getattr(self.collective, name) for name in names}
