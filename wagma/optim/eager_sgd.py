"""Eager-SGD: averages gradients without waiting for stragglers (Li et al., PPoPP 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from collectives.agreement import agreed
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given
from wagma.optim.gradients import FlatGradients
from wagma.optim.joining import join_blocks

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class EagerSGD(Averager):
    """Contribute the gradient, and take a step with the contributions averaged since the last one.

    A late rank receives the newest average, and its gradient is in the next; no gradient is lost or
    counted twice. If nothing is new the gradient is 0. After every τ-th step all gradients have
    been applied, and all ranks have the average of their models. A weight multiplies the gradient.
    The local optimizer's state is not averaged. `Averager` describes what all methods share;
    gradients, closures and several optimizers are as for `Allreduce`.

    A checkpoint is exact after a τ-th step: it lacks gradients that other ranks have not received
    yet.

    Attributes:
        collective: the `collectives.PartialAllreduce` that averages.

    Source: Taming unbalanced training workloads in deep learning with partial collective
    operations, PPoPP 2020; the periodic average of models is WAGMA-SGD's.
    """

    averages_gradients = True
    _simulated_vectors = 6
    _uses_windows = True
    collective: collectives.PartialAllreduce

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        trigger: str = "solo",
        sync_period: int = 10,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`; an optimizer that needs no closure.
            trigger: "solo": an average begins when the first rank arrives. "majority": when a rank
                drawn for it arrives; on average half of the ranks have arrived then.
            sync_period: τ, steps from one average over all ranks to the next, at least 1.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)

    def _check_settings(self, **settings: Any) -> dict[str, Any]:
        if not self.optimizers.given:
            raise ValueError(
                "EagerSGD needs the optimizer, with which it applies gradients that arrive late"
            )
        return {}

    def _make_collective(self, comm: MPI.Intracomm, **options: Any) -> Any:
        self._gradients = agreed(comm, lambda: FlatGradients(self.flat))
        return collectives.PartialAllreduce(comm, self._gradients.vectors, **options)

    def _average_gradients(self, weight: float, finite: bool) -> bool:
        """Contribute the gradient, and put what has been averaged since in its place."""
        self.flat.check_places()
        self._gradients.fill(finite)
        own = np.array(self._gradients.own)  # all False if gradients are not finite
        if weight != 1:
            self._gradients.multiply(weight)
        self._note(self.collective(self._gradients.vectors))
        self._end_call()
        self._take_what_has_come(own)
        return True

    def _average(self, weight: float) -> None:
        """After every τ-th step, average the models."""
        if self._result is not None and self._result.synchronized:
            self._average_now()
            self._changed()

    def _average_now(self) -> None:
        """Set every rank's model to the average over all ranks; contributions are unaffected."""
        self.collective.average(self._give())

    def _settle(self) -> None:
        """Apply all contributions, and set every rank's model to the average; collective."""
        self._check_usable()
        with join_blocks.enter() as begun:
            begun.enter_context(self._joined())

    def _go_on_from(self, averaging: dict[str, Any]) -> None:
        """Continue with its version, without outstanding contributions."""
        self.collective.load(averaging["version"])

    @contextmanager
    def _joining(self) -> Iterator[None]:
        made = self.collective.version
        self._gradients.clear()
        with self.collective.joining(self._gradients.vectors):
            yield
        is_last = made == self.collective.version
        if is_last:
            self._take_what_has_come()
            with self._steps_of.quiet():
                for optimizer in self.optimizers.given:
                    optimizer.step()
        self.collective.average(self._give(), weight=float(is_last))

    def _take_what_has_come(self, own: np.ndarray | bool = False) -> None:
        """Set the gradients of parameters for which some have arrived or are this rank's own."""
        self._gradients.write_back((self._gradients.shares(self.collective) != 0) | own)
