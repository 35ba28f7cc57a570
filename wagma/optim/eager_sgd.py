"""Eager-SGD: averages gradients without waiting for stragglers (Li et al., PPoPP 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from collectives.agreement import agreed
from wagma.optim.gradients import FlatGradients, GradientAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class EagerSGD(GradientAveraging):
    """Contribute the gradient, and take a step with the contributions averaged since the last one.

    A late rank receives the newest average, and its gradient is in the next; no gradient is lost or
    counted twice. If nothing is new the gradient is 0. After every τ-th step all gradients have
    been applied, and all ranks have the average of their models. A weight multiplies the gradient.
    The local optimizer's state is not averaged. `GradientAveraging` and `Averaging` describe what
    all methods that average gradients share.

    A checkpoint is exact after a τ-th step: it lacks gradients that other ranks have not received
    yet.

    Example:
        >>> optimizer = EagerSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.PartialAllreduce` that averages.

    Source: Taming unbalanced training workloads in deep learning with partial collective
    operations, PPoPP 2020; the periodic average of models is WAGMA-SGD's.
    """

    _simulated_vectors = 6
    _uses_windows = True
    collective: collectives.PartialAllreduce

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        trigger: str = "solo",
        sync_period: int = 10,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer: any `torch.optim.Optimizer` of the model's parameters that needs no closure.
            model, comm: as for `Averaging`.
            trigger: "solo": an average begins when the first rank arrives. "majority": when a rank
                drawn for it arrives; on average half of the ranks have arrived then.
            sync_period: τ, steps from one average over all ranks to the next, at least 1.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer, model, {"trigger": trigger, "sync_period": sync_period}, comm=comm, **options
        )

    def _make_collective(self, comm: MPI.Intracomm, **options: Any) -> collectives.PartialAllreduce:
        self._gradients = agreed(comm, lambda: FlatGradients(self.flat))
        return collectives.PartialAllreduce(comm, self._gradients.vectors, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The trigger and τ."""
        return {"trigger": self.collective.trigger, "sync_period": self.collective.sync_period}

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Contribute the gradient, and take a step of the wrapped optimizer with the average."""
        loss = self._compute_gradients(closure)
        own = np.array(self._gradients.own)  # all False if gradients are not finite
        if weight != 1:
            self._gradients.multiply(weight)
        result = self.collective(self._gradients.vectors)
        self._note(result)
        returned = self._step_with_what_has_come(own)
        if result.synchronized:
            self._average_now()
            self.flat.mark_changed()
        return returned if closure is None else loss

    def _average_now(self) -> None:
        """Set every rank's model to the average over all ranks; contributions are unaffected."""
        self.collective.average(self._vectors)

    def _settle(self) -> None:
        """Apply all contributions, and set every rank's model to the average; collective."""
        with self.join():
            pass

    def _go_on_from(self, averaging: dict[str, Any]) -> None:
        """Continue with its version, without outstanding contributions."""
        self.collective.load(averaging["version"])

    @contextmanager
    def _joining_collective(self) -> Iterator[None]:
        made = self.collective.version
        self._gradients.clear()
        with self.collective.joining(self._gradients.vectors):
            yield
        is_last = made == self.collective.version
        if is_last:
            self._step_with_what_has_come()
        self.collective.average(self._vectors, weight=float(is_last))

    def _step_with_what_has_come(self, own: np.ndarray | bool = False) -> Any:
        """Take a step with the parameters whose gradients have arrived or are this rank's own."""
        self._gradients.write_back((self._gradients.shares(self.collective) != 0) | own)
        return self._bare_step()
