"""Allreduce-SGD: synchronous data parallelism, the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.gradients import FlatGradients, GradientAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class Allreduce(GradientAveraging):
    """Average the gradients over all ranks at every step, before the local optimizer's step.

    All ranks wait for each other, take the same step, and have the same parameters, bit for bit; up
    to rounding, these are the parameters of one process that trains on all ranks' batches.
    `GradientAveraging` and `Averaging` describe what all methods that average gradients share.

    Example:
        >>> optimizer = Allreduce(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Source: Allreduce-SGD, a baseline of WAGMA-SGD (Li et al., TPDS 2021).
    """

    collective: collectives.GroupAllreduce

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.GroupOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer: any `torch.optim.Optimizer` of the model's parameters that needs no closure.
            model, comm: as for `Averaging`.
            **options: see `collectives.GroupOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(optimizer, model, {}, comm=comm, **options)

    def _make_collective(self, comm: MPI.Intracomm, **options: Any) -> collectives.GroupAllreduce:
        self._gradients = FlatGradients(self.flat)
        return collectives.GroupAllreduce(
            comm,
            self._gradients.vectors,
            group_size=1,
            sync_period=1,
            wait="group",
            late="paper",  # a vector is averaged itself, not as a change of the last mean
            **options,
        )

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Average the gradients over all ranks, then take a step of the wrapped optimizer."""
        loss = self._compute_gradients(closure)
        result = self.collective(self._gradients.vectors, weight=weight)
        self._note(result)
        if result.weight > 0:
            # A rank whose gradients are all in the mean need not read which ones are.
            present: Iterable[Any] = self._gradients.own
            if not (result.timely and weight > 0 and all(present)):
                present = self._gradients.shares(self.collective)
            self._gradients.write_back(present)
            returned = self._bare_step()
            return returned if closure is None else loss
        return loss
