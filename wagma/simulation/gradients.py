"""The gradients of simulated ranks: of several at once where the model allows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as trees

from wagma.simulation.generators import states, undrawn
from wagma.tasks.contract import Task

if TYPE_CHECKING:
    from wagma.simulation.trainer import SimulatedTrainer

__all__ = ["Batched", "Gradient", "threads"]

MOST = 64  # ranks at once: more need more memory, and are no faster
# How far gradients computed at once may be from those computed one by one, relative to the largest
# element of a parameter's gradient.
TOLERANCE = 1e-4

log = logging.getLogger(__name__)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Gradient:
    """The gradient that a rank computes in a step.

    Attributes:
        trainer: the rank's.
        batches: the batches of the step.
        loss: their mean loss, or with a `compute_limit` the sum, once the gradient is in the
            parameters; until then None.
    """

    def __init__(self, trainer: SimulatedTrainer, batches: list[Any]) -> None:
        self.trainer, self.batches = trainer, batches
        self.loss: float | None = None

    def compute(self) -> float:
        """Set the parameters' gradients, unless they are; return the loss."""
        if self.loss is None:
            self.trainer.local.zero_grad()
            self.loss = float(self.trainer.gradient_of(self.batches))
        return self.loss


class Loss(nn.Module):
    """A task's loss as a module, whose parameters are the model's.

    Args:
        task: the task.
        model: the model.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return self.task.loss(self.model, batch)


class Batched:
    """Computes the gradients of all ranks that compute, when the first of their steps ends.

    A rank's gradient depends on the model that the rank has when its step begins, and no other rank
    changes that. The first time, one rank's gradient is computed in both ways and compared; ranks
    whose model does not allow it, such as one that draws random numbers or changes buffers, compute
    their gradients one by one.

    Args:
        task: the task that is trained.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.works: bool | None = None

    def answer(self, rank: int, work: dict[int, Gradient]) -> None:
        """Compute gradients, unless that of the rank whose step ends is known."""
        if work[rank].loss is not None or self.works is False:
            return
        kind = kind_of(work[rank])
        pending = [each for each in work.values() if each.loss is None and kind_of(each) == kind]
        if len(pending) < 2:  # none if the batch is not of tensors
            return
        pending.sort(key=lambda each: each is not work[rank])
        if self.works is None:
            self.works = self._try(pending[:2])
            log.debug("gradients are computed %s", "at once" if self.works else "one by one")
            if not self.works:
                return
            pending = pending[2:]
        try:
            for first in range(0, len(pending), MOST):
                self._compute(pending[first : first + MOST])
        except Exception as error:
            log.info("gradients cannot be computed at once any longer: %s", error)
            self.works = False

    def _try(self, pair: list[Gradient]) -> bool:
        """Return whether gradients computed at once agree with those computed one by one.

        If they do, both ranks' are then known; else neither's.
        """
        trainer = pair[0].trainer
        if any(True for _ in trainer.model.buffers()) or trainer.device.type != "cpu":
            return False
        with undrawn():
            try:
                drawn = states()
                self._compute(pair)
                alike = states() == drawn and all(map(self._is_confirmed, pair))
            except Exception as error:
                log.info("gradients cannot be computed at once: %s", error)
                alike = False
        if not alike:
            for each in pair:
                each.loss = None
        return alike

    def _is_confirmed(self, work: Gradient) -> bool:
        """Return whether a gradient is what a rank would compute alone, which replaces it."""
        parameters = list(work.trainer.model.parameters())
        found = [parameter.grad for parameter in parameters]
        work.loss = None
        work.compute()
        return all(
            are_close(gradient, parameter.grad)
            for gradient, parameter in zip(found, parameters, strict=True)
        )

    def _compute(self, several: list[Gradient]) -> None:
        """Compute these gradients at once; all have the same kinds of batches.

        Raises:
            ValueError: the model keeps something other than parameters, which is then as before.
        """
        before = [(module, dict(vars(module))) for module in several[0].trainer.model.modules()]
        try:
            self._compute_at_once(several)
        finally:
            changed = [each for each in before if not is_same(vars(each[0]), each[1])]
            for module, attributes in changed:
                vars(module).clear()
                vars(module).update(attributes)
        if changed:
            for each in several:
                each.loss = None
            raise ValueError(f"{type(changed[0][0]).__name__} changes in a step")

    def _compute_at_once(self, several: list[Gradient]) -> None:
        first = several[0]
        loss = Loss(self.task, first.trainer.model)
        names = [name for name, value in loss.named_parameters() if value.requires_grad]
        models = [dict(Loss(self.task, e.trainer.model).named_parameters()) for e in several]
        values = {name: torch.stack([m[name].detach() for m in models]) for name in names}
        total: Any = 0.0
        gradients: dict[str, torch.Tensor] = {}
        compute = vmap(
            grad_and_value(lambda parameters, batch: functional_call(loss, parameters, (batch,)))
        )
        count = first.trainer.divisor(first.batches)
        for number in range(len(first.batches)):
            batch = trees.tree_map(
                lambda *parts: torch.stack(parts), *[each.batches[number] for each in several]
            )
            more, losses = compute(values, batch)
            total = total + losses / count
            for name in names:
                part = more[name] if count == 1 else more[name] / count
                gradients[name] = gradients[name] + part if name in gradients else part
        for k, model in enumerate(models):
            for name in names:
                model[name].grad = gradients[name][k]
        for each, value in zip(several, total.tolist(), strict=True):
            each.loss = value


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two objects' attributes are the same objects."""
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def kind_of(work: Gradient) -> Any:
    """Return what must be equal for two ranks' batches to be stacked."""
    leaves, structure = trees.tree_flatten(work.batches)
    return structure, tuple(
        (each.shape, each.dtype) if isinstance(each, torch.Tensor) else object() for each in leaves
    )


def are_close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two gradients are equal up to rounding, relative to their largest element."""
    if one is None or other is None:
        return one is other
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool((one - other).abs().max() <= TOLERANCE * scale) if other.numel() else True
