"""Local SGD: ranks train alone and average their models now and then (Stich, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.averaging import Averaging, weights_of

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI


class LocalSGD(Averaging):
    """Average the model over all ranks after every τ-th step of a local optimizer.

    In between each rank trains alone; after the average, for which all wait, all have the same
    model, bit for bit. What holds for all methods is said in `Averaging`. The local optimizer's
    state, such as its momentum, stays each rank's own. A model that is not finite is left out of
    an average, and gets it. What a rank that has left `join` did before is in the next average.

    With `trigger="solo"` the first rank that has made τ steps since the last average starts the
    next one; the others take part as soon as they have ended the step that they are in. Slow ranks
    then make fewer steps: let weights be by work. Ranks make different numbers of steps in all:
    `averaged` and `synchronize` wait for the ranks that still make some, and average all, and
    neither can be used inside `join`. A `state_dict` counts averages, not steps.

    Example:
        >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_period=8)

    Attributes:
        collective: the `collectives.GroupAllreduce` that averages; of trigger "solo" the
            `collectives.TriggeredAverage`.
        trigger: as given.

    Source: Stich, Local SGD converges fast and communicates little, ICLR 2019. Weights by work, of
    ranks that are not equally fast: WP-SGD (Cheng et al.), Eq. 6 and Algorithm 5.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        sync_period: int = 10,
        trigger: str = "count",
        weights: str = "given",
        contraction: float = 0.9,
        comm: MPI.Intracomm | None = None,
        wire_dtype: str | torch.dtype | None = None,
        engine: str | None = None,
        transport: str | None = None,
        stall: float | None = None,
        abort: float | None = None,
        log_level: str | None = None,
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            sync_period: τ, steps from one average to the next, at least 1.
            trigger: "count": all average after τ steps of each. "solo": after τ steps of the first.
            weights, contraction: as for `collectives.GroupAllreduce`: whether a model weighs what
                its last step gave, or by the rank's work since the last average.
            wire_dtype, engine, transport, stall, abort, log_level: as for
                `collectives.GroupAllreduce`.

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
                "wire_dtype": wire_dtype,
            },
            comm=comm,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )
        self.trigger = trigger

    def _check_settings(self, optimizer, *, trigger, **settings):
        if trigger not in ("count", "solo"):
            raise ValueError(f"trigger is {trigger!r}, not one of count, solo")
        return {"trigger": trigger}

    def _make_collective(self, comm, *, trigger, **options):
        if trigger == "solo":
            return collectives.TriggeredAverage(comm, self.flat.vectors, **options)
        return collectives.GroupAllreduce(
            comm, self.flat.vectors, group_size=1, wait="group", **options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """τ, who starts an average, and what models weigh."""
        return {
            "sync_period": self.collective.sync_period,
            "trigger": self.trigger,
            **weights_of(self.collective),
        }

    @property
    def _steps(self) -> int:
        return self.collective.calls if self.trigger == "solo" else self.collective.version

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step.

        With trigger "solo" it waits for ranks that still make steps, and averages with them.

        Raises:
            RuntimeError: with trigger "solo", inside `join`.
        """
        self._check_outside_join("synchronize()")
        super().synchronize()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model, to evaluate or save it; collective.

        As `Averaging.averaged`; with trigger "solo", whose ranks are not at the same step, they
        average and go on from there, as in `synchronize`.

        Raises:
            RuntimeError: with trigger "solo", inside `join`.
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

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step of the wrapped optimizer, then average the model if it is time to."""
        loss = self._local_step(closure)
        self._average_model(weight=weight)  # alone but for the call in which all average
        return loss
