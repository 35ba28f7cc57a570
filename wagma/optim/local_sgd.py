"""Local SGD: ranks train alone and average their models now and then (Stich, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.averaging import Averaging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI


class LocalSGD(Averaging):
    """Average the model over all ranks after every τ-th step of a local optimizer.

    In between each rank trains alone; after the average, for which all wait, all have the same
    model, bit for bit. What holds for all methods is said in `Averaging`. The local optimizer's
    state, such as its momentum, stays each rank's own. A model that is not finite is left out of
    an average, and gets it. What a rank that has left `join` did before is in the next average.

    Example:
        >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_period=8)

    Attributes:
        collective: the `collectives.GroupAllreduce` that averages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        sync_period: int = 10,
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
            wire_dtype, engine, transport, stall, abort, log_level: as for
                `collectives.GroupAllreduce`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {"sync_period": sync_period, "wire_dtype": wire_dtype},
            comm=comm,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    def _make_collective(self, comm, *, sync_period, **options):
        return collectives.GroupAllreduce(
            comm, self.flat.vectors, group_size=1, sync_period=sync_period, wait="group", **options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """τ."""
        return {"sync_period": self.collective.sync_period}

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step of the wrapped optimizer, then average the model if this is a τ-th step."""
        loss = self._local_step(closure)
        self._average_model(weight=weight)  # in groups of one but for every τ-th call
        return loss
