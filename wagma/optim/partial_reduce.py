"""Partial Reduce: groups of the ranks that are ready first average (Miao et al., SIGMOD 2021)."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack  # torch's, too

import collectives
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given


class PartialReduce(Averager):
    """Average the model in a group of the ranks that are ready first.

    A step waits until `group_size` ranks are ready, and so for no straggler. `Averager` describes
    what all methods share. A model that is not finite is excluded from an average, and is replaced
    by it.

    Source: that of `collectives.ReadyGroupAllreduce`, its `collective`.
    """

    _is_weighted = False
    _makes = collectives.ReadyGroupAllreduce
    collective: collectives.ReadyGroupAllreduce

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        group_size: int | None = None,
        weights: str = "constant",
        alpha: float = 0.5,
        missing: str = "nearest",
        history: int | None = None,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            group_size: P', number of ranks in a group, at least 2; None: 3, or all if there are
                fewer.
            weights: "constant": all members of a group have the same weight. "dynamic": the older
                an iteration, the smaller its weight, which the models of that iteration share, so
                that one old model may weigh more than each of several new ones. "dynamic-each": the
                older a model, the smaller its weight.
            alpha: α of "dynamic" and "dynamic-each", from 0 to less than 1: the smaller, the lower
                the weight of older models.
            missing: of weights="dynamic": the model that gets the weight of iterations that none
                has. "nearest": the nearest that a member has. "initial": the initial model, of
                which each rank keeps a copy. `collective.initial_share` is its share.
            history: number of recent groups, T, in which the controller checks which ranks have
                met; None: enough to connect N ranks: (N / S) (ln N + 3).
            sync_every: number of a rank's steps from one average to the next.
            controller_rank: the rank whose engine forms groups.
            controller_only: whether the controller's rank makes no steps. It takes part in the
                other collective methods, without weight: let it `join()`. `collective.participates`
                tells which ranks make steps.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)

    def report(self) -> dict[str, Any]:
        """Return ρ of the run's groups, with constant weights, or the initial model's mean share.

        ρ is known to the controller's rank: see `collectives.ReadyGroupAllreduce.rho`.
        """
        report: dict[str, Any] = {"rho": self.collective.rho}
        if self.collective.missing == "initial":
            report["initial_share_of_rank"] = self.collective.initial_share
        return report
