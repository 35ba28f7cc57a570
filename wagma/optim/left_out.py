"""What a rank says of updates that were left out, and of steps that were never averaged."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import torch

from wagma.optim.optimizers import is_finite

if TYPE_CHECKING:
    from wagma.optim.averaging import Averaging

log = logging.getLogger(__name__)


class LeftOut:
    """Counts what of a rank is left out, as it is not finite, and says so the 1st, 10th, … time.

    Args:
        averager: the rank's.

    Attributes:
        of_updates, of_buffers: how many updates, and buffers in calls, were left out.
        names: of tensors that are left out of the present call.
    """

    def __init__(self, averager: Averaging):
        self._averager: Averaging = weakref.proxy(averager)  # which has this
        self.of_updates = self.of_buffers = 0
        self.names: tuple[str, ...] = ()
        self._suspected: tuple[int, str | None] | None = None  # a step, and a parameter
        parameters = [tensor.value for tensor in averager.flat.parameters]
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._parameters = parameters
        # A pass over one that is trained tells that the model is.
        self._trained = False
        self.rebase()
        self._handles = [
            value.register_post_accumulate_grad_hook(self._saw_gradient)
            for value in parameters
            if value.requires_grad
        ]

    def _saw_gradient(self, _: torch.Tensor) -> None:
        self._trained = True
        self.stop()

    def rebase(self) -> None:
        """Take the model as it is for one that was not trained, before the first step."""
        if not self._averager.steps:
            self._versions = [(value, value._version) for value in self._parameters]

    def stop(self) -> None:
        """Look for no further gradients."""
        while self._handles:
            self._handles.pop().remove()

    def buffers(self, names: list[str]) -> None:
        """Note the buffers of a call that have elements which are not finite."""
        self.names = (*self.names, *names)
        for name in names:
            self.of_buffers += 1
            what = f"elements of buffer {name!r} that are not finite"
            self._say(what, self.of_buffers, "", self._averager.steps)

    def begin_step(self) -> None:
        """Forget what was noted of the step before."""
        self._suspected, self.names = None, ()

    def suspect(self, tame: bool = False) -> None:
        """Note which gradient is not finite, if any, before an update that may be left out."""
        if tame:
            return
        found = (
            tensor.name
            for tensor in self._averager.flat.parameters
            if tensor.value.grad is not None and not is_finite(tensor.value.grad)
        )
        self._suspected = self._averager.steps, next(found, None)

    def update(self, spoilt: list[str]) -> None:
        """Note an update that was not finite, and whose states were put back."""
        if self._suspected is None:
            self.suspect()
        assert self._suspected is not None
        (step, name), self._suspected = self._suspected, None
        self.of_updates += 1
        self.names = (*self.names, name or "update")
        where = f" (the gradient of {name!r})" if name else ""
        more = f"; the state of {', '.join(spoilt)} was put back" if spoilt else ""
        self._say(f"an update that is not finite{where}", self.of_updates, more, step)

    def _say(self, what: str, count: int, more: str, step: int) -> None:
        if str(count).strip("0") != "1":
            return
        rank = self._averager.collective.rank
        log.warning(
            "rank %d, step %d: %s: left out, %s so far%s; said the 1st, 10th, 100th, … time",
            *(rank, step, what, f"{count:,}", more),
        )

    def check_heard(self) -> None:
        """Raise RuntimeError if the model was trained, and the averager made no version."""
        if error := self.unheard():
            raise error

    def unheard(self, *, closing: bool = False) -> RuntimeError | None:
        """Return the error for a model that was trained without a version of the averager.

        It was if it has changed since a gradient was computed: by an optimizer that the
        averager was not given, or by other methods of one than `step`.
        """
        averager = self._averager
        if averager.steps or averager.closed:
            return None
        if closing and (missing := averager._steps_of.missing):
            return RuntimeError(
                f"{missing} of the optimizers made no step, and this {type(averager).__name__} "
                "averager averages once all have: give it only those that train"
            )
        if not self._trained or averager._steps_of.heard:
            return None
        if all(value._version == version for value, version in self._versions):
            return None
        return RuntimeError(
            f"the model was trained, but this {type(averager).__name__} averager has heard of no "
            f"step of {averager.optimizers}: call averager.step() after each update that is not "
            "made by the step() of an optimizer that it was given"
        )
