"""Local SGD: ranks train alone and average their models periodically (Stich, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given
from wagma.optim.extras import Extra
from wagma.optim.shards import Shards

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class LocalSGD(Averager):
    """Average the model over all ranks after every τ-th step of a local optimizer.

    Between averages each rank trains alone; all ranks wait for an average, and then have the same
    model, bit for bit. `Averager` describes what all methods share. The local optimizer's state,
    such as its momentum, is not averaged. A model that is not finite is excluded from an average,
    and is replaced by it. The steps that a rank made before it left `join` are in the next average.

    With `trigger="solo"` the first rank that has made τ steps since the last average starts the
    next one; the others take part when they have completed their current step. Slow ranks then make
    fewer steps: use weights by work. Ranks make different numbers of steps in all: `averaged` and
    `synchronize` wait for ranks that still make steps, and average all; neither can be used inside
    `join`. The "version" of a `state_dict` counts averages then, not steps.

    Attributes:
        collective: the `collectives.GroupAllreduce` that averages; with trigger "solo" the
            `collectives.TriggeredAverage`.
        trigger: as given.

    Source: Stich, Local SGD converges fast and communicates little, ICLR 2019. Weights by work, for
    ranks that are not equally fast: WP-SGD (Cheng et al.), Eq. 6 and Algorithm 5.
    """

    _uses_windows = True

    _makes: Any = collectives.GroupAllreduce
    _not_for_it = ("trigger", "average_state", "correction")
    collective: collectives.GroupAllreduce | collectives.TriggeredAverage

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        sync_period: int = 10,
        trigger: str = "count",
        weights: str = "given",
        contraction: float = 0.9,
        average_state: bool = False,
        correction: str | None = None,
        wire_dtype: str | torch.dtype | None = None,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            sync_period: τ, steps from one average to the next, at least 1.
            trigger: "count": all ranks average after τ steps of each. "solo": after τ steps of the
                first.
            weights, contraction: as for `collectives.GroupAllreduce`: the weight of a model is the
                one given to its last step, or depends on the rank's work since the last average.
            average_state, correction: for ranks with different data, see `Averager`; a correction
                needs weights="given".
            wire_dtype: as for `collectives.GroupAllreduce`.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)
        self.trigger = trigger

    def _check_settings(
        self,
        *,
        trigger: str,
        weights: str,
        average_state: bool,
        correction: str | None,
        **settings: Any,
    ) -> dict[str, Any]:
        if trigger not in ("count", "solo"):
            raise ValueError(f"trigger is {trigger!r}, not one of count, solo")
        self._survives = trigger == "count"
        self._shards = Shards(average_state, correction, often=True)
        self._shards.check_weights(weights)
        return {"trigger": trigger, **self._shards.settings}

    def _make_extras(self, *, sync_period: int, **settings: Any) -> list[Extra]:
        return self._shards.make(self.flat, sync_period, replaced=True)

    def _make_collective(self, comm: MPI.Intracomm, **options: Any) -> Any:
        if options["trigger"] == "solo":
            self._makes = collectives.TriggeredAverage
            return super()._make_collective(comm, **options)
        # In a group of one rank, except for every τ-th call.
        alone = {"group_size": 1, "wait": "group", "by_value": self.flat.by_value}
        return super()._make_collective(comm, **alone, **options)

    def _average_all(self) -> None:
        solo = self.trigger == "solo"
        if solo and self._inside_join:
            raise RuntimeError(
                "synchronize() or averaged() inside join() with trigger='solo', where ranks make "
                "different numbers of steps: use it after the block"
            )
        super()._average_all()
        # Ranks that waited for others' averages had no weight in all but the first of these.
        for extra in self._extras if solo else ():
            extra.joined()

    @contextmanager
    def _holding(self, get: Callable[[], Any], *, together: bool = False) -> Iterator[Any]:
        if together and self.trigger == "solo":  # ranks may not be at the same step
            self.synchronize()
        with super()._holding(get, together=together) as got:
            yield got

    @property
    def _may_average(self) -> bool:
        averaging = self.collective
        return self.trigger == "solo" or (averaging.version + 1) % averaging.sync_period == 0

    def _check_weight(self, weight: float) -> None:
        self._shards.check_weight(weight)
