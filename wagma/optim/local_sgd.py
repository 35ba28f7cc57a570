"""Local SGD: ranks train alone and average their models periodically (Stich, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.averaging import Averaging, weights_of
from wagma.optim.extras import Extra
from wagma.optim.shards import Shards
from wagma.optim.survival import Recovery

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class LocalSGD(Averaging):
    """Average the model over all ranks after every τ-th step of a local optimizer.

    Between averages each rank trains alone; all ranks wait for an average, and then have the same
    model, bit for bit. `Averaging` describes what all methods share. The local optimizer's state,
    such as its momentum, is not averaged. A model that is not finite is excluded from an average,
    and is replaced by it. The steps that a rank made before it left `join` are in the next average.

    With `trigger="solo"` the first rank that has made τ steps since the last average starts the
    next one; the others take part when they have completed their current step. Slow ranks then make
    fewer steps: use weights by work. Ranks make different numbers of steps in all: `averaged` and
    `synchronize` wait for ranks that still make steps, and average all; neither can be used inside
    `join`. A `state_dict` counts averages, not steps.

    Example:
        >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_period=8)

    Attributes:
        collective: the `collectives.GroupAllreduce` that averages; with trigger "solo" the
            `collectives.TriggeredAverage`.
        trigger: as given.

    Source: Stich, Local SGD converges fast and communicates little, ICLR 2019. Weights by work, for
    ranks that are not equally fast: WP-SGD (Cheng et al.), Eq. 6 and Algorithm 5.
    """

    _uses_windows = True

    collective: collectives.GroupAllreduce | collectives.TriggeredAverage

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        sync_period: int = 10,
        trigger: str = "count",
        weights: str = "given",
        contraction: float = 0.9,
        average_state: bool = False,
        correction: str | None = None,
        comm: MPI.Intracomm | None = None,
        wire_dtype: str | torch.dtype | None = None,
        survive: bool | Callable[[Recovery], object] = False,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            survive: as for `Averaging`; with trigger "count" only.
            sync_period: τ, steps from one average to the next, at least 1.
            trigger: "count": all ranks average after τ steps of each. "solo": after τ steps of the
                first.
            weights, contraction: as for `collectives.GroupAllreduce`: the weight of a model is the
                one given to its last step, or depends on the rank's work since the last average.
            average_state, correction: for ranks with different data, see `Averaging`; a correction
                needs weights="given".
            wire_dtype: as for `collectives.GroupAllreduce`.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {
                "sync_period": sync_period,
                "trigger": trigger,
                "weights": weights,
                "contraction": contraction,
                "average_state": average_state,
                "correction": correction,
                "wire_dtype": wire_dtype,
            },
            comm=comm,
            survive=survive,
            **options,
        )
        self.trigger = trigger

    def _check_settings(
        self,
        optimizer: torch.optim.Optimizer,
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

    def _make_collective(
        self,
        comm: MPI.Intracomm,
        *,
        trigger: str,
        average_state: bool,
        correction: str | None,
        **options: Any,
    ) -> collectives.GroupAllreduce | collectives.TriggeredAverage:
        if trigger == "solo":
            return collectives.TriggeredAverage(comm, self._vectors, **options)
        return collectives.GroupAllreduce(
            comm, self._vectors, group_size=1, wait="group", **options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """τ, the trigger, and the weights."""
        return {
            "sync_period": self.collective.sync_period,
            "trigger": self.trigger,
            **weights_of(self.collective),
            **self._shards.settings,
        }

    @property
    def _steps(self) -> int:
        averaging = self.collective
        if isinstance(averaging, collectives.TriggeredAverage):
            return averaging.calls
        return averaging.version

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step.

        With trigger "solo" it waits for ranks that still make steps, and averages with them.

        Raises:
            RuntimeError: as `Averaging.synchronize`; with trigger "solo" inside `join`, too.
            collectives.ClosedError: after `close`.
        """
        self._check_outside_join("synchronize()")
        super().synchronize()
        if self.trigger == "solo":
            # Ranks that waited for others' averages had no weight in all but the first of these.
            for extra in self._extras:
                extra.joined()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model, to evaluate or save it; collective.

        As `Averaging.averaged`. With trigger "solo", when ranks are not at the same step, they
        average and continue from there, as in `synchronize`.

        Raises:
            RuntimeError: as `Averaging.averaged`; with trigger "solo" inside `join`, too.
            collectives.ClosedError: after `close`.
        """
        self._check_outside_join("averaged()")
        if self.trigger == "solo":
            self.synchronize()
        with super().averaged():
            yield

    def _check_outside_join(self, what: str) -> None:
        self._check_usable()
        self.flat.check()
        if self.trigger == "solo" and self._inside_join:
            raise RuntimeError(
                f"{what} inside join() with trigger='solo', where ranks make different numbers of "
                "steps: use it after the block"
            )

    @property
    def _may_average(self) -> bool:
        averaging = self.collective
        return self.trigger == "solo" or (averaging.version + 1) % averaging.sync_period == 0

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step of the wrapped optimizer, then average the model if it is due."""
        self._shards.check_weight(weight)
        loss = self._local_step(closure)
        self._average_model(weight=weight)  # in a group of one rank, except for every τ-th call
        return loss
