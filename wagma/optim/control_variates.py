"""Control variates, which correct each rank's gradients towards the mean of all ranks' (SCAFFOLD).

Where ranks have different data, the steps between two averages take each model towards the optimum
of its own data, and constant learning rates end at a biased point. Rank r keeps cr, the mean of its
gradients over its last τ steps. The mean c of all cr is averaged as a part of the vector, as the
model is: when cr changes, the rank adds the change to its c, so that the sum over ranks of c is
that of cr. A step uses g + c − cr instead of the gradient g.

Source: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020, option II. Without a server, at any pace: our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from wagma.optim.extras import Extra
from wagma.optim.flat import FlatModel, dense_gradient
from wagma.optim.optimizers import Optimizers
from wagma.optim.tensors import ids_of
from wagma.optim.vectors import new_vector

# Optimizers whose only use of the gradient besides second moments is m = β₁ m + (1 − β₁) g.
WITH_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam)


class Variate(NamedTuple):
    """A vector for each dtype of a model, and its part for each parameter."""

    memory: list[torch.Tensor]
    parts: dict[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, flat: FlatModel, zeros: Callable[..., torch.Tensor] = torch.zeros) -> Variate:
        """Return zeros for a model's parameters, as `zeros` makes them."""
        memory: list[torch.Tensor] = []
        found: dict[torch.Tensor, torch.Tensor] = {}
        for dtype in flat.dtypes:
            values = [t.value for t in flat.parameters if t.value.dtype is dtype]
            if values:
                vector, parts = new_vector(values, zeros=zeros)
                memory.append(vector)
                found.update(zip(values, parts, strict=True))
        return cls(memory, found)

    def zero(self) -> None:
        """Set it to 0."""
        for vector in self.memory:
            vector.zero_()

    def copy(self, other: Variate) -> None:
        """Set it to another one."""
        for vector, value in zip(self.memory, other.memory, strict=True):
            vector.copy_(value)

    def add(self, other: Variate, alpha: float = 1.0) -> None:
        """Add `alpha` times another one."""
        for vector, value in zip(self.memory, other.memory, strict=True):
            vector.add_(value, alpha=alpha)


class ControlVariates(Extra):
    """A rank's control variates.

    All ranks have the same weight. A rank that leaves `join` takes its cr out of c; after the
    block, and after a checkpoint of another rank or another number of ranks, every cr is c.

    Gradients are those that `step` finds in the parameters, unscaled, and clipped if the user does
    that; the corrected ones replace them there. Parameters without a gradient are not corrected. An
    Adam whose state is averaged keeps second moments of uncorrected gradients, and corrects only
    the first moments, unless its β₁ is 0.

    Args:
        optimizers: the local ones.
        flat: the model.
        steps: τ, number of steps with a gradient that cr is the mean of.
        by_moments: whether first moments are corrected instead of gradients, if the optimizer is
            one of `WITH_MOMENTS`.
        replaced: whether a vector that is not finite has weight 0, and is replaced by the others'
            mean, rather than the change alone left out.

    Attributes:
        mean: c, which is averaged.
        own: cr.
    """

    @torch.inference_mode(False)  # whatever the caller's mode, steps change them later
    def __init__(
        self,
        optimizers: Optimizers,
        flat: FlatModel,
        *,
        steps: int,
        by_moments: bool,
        replaced: bool,
    ):
        self.optimizers, self.flat, self.replaced = optimizers, flat, replaced
        self._steps, self._by_moments = steps, by_moments
        for tensor in flat.parameters:
            if tensor.value.is_complex():
                raise TypeError(f"correction: {tensor.kind} {tensor.name!r} is complex")
        self.mean = Variate.of(flat, flat.zeros)
        self.own, self._sum = Variate.of(flat), Variate.of(flat)
        self.memory = self.mean.memory
        self._count = 0  # of the gradients in the sum
        self._excluded = -1  # vectors excluded before a call that is to take a new cr along
        self._before: list[torch.Tensor] | None = None

    @property
    def part(self) -> list[torch.Tensor]:
        """cr, which counts in c only while this rank publishes."""
        return self.own.memory

    # A step

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the gradients of an optimizer's parameters to their sum, and correct them.

        Raises:
            TypeError: a gradient is sparse.
        """
        self._end_period(taken=True)  # if an exception has interrupted the call
        self._before = None
        # Nobody resets the gradients of others, which the local optimizer does not use.
        members = ids_of(optimizer.param_groups)
        tensors = [each for each in self.flat.parameters if id(each.value) in members]
        found = [(tensor.value, dense_gradient(tensor)) for tensor in tensors]
        gradients = {value: gradient for value, gradient in found if gradient is not None}
        if not gradients:
            return
        torch._foreach_add_([self._sum.parts[p] for p in gradients], list(gradients.values()))
        self._count += optimizer is self.optimizers.given[0]
        if self._by_moments and isinstance(optimizer, WITH_MOMENTS):
            self._correct_moments(optimizer, gradients)
        else:
            self._correct(gradients)

    def _correct(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Change the gradients of these parameters from g to g + c − cr."""
        values = list(gradients.values())
        torch._foreach_add_(values, [self.mean.parts[p] for p in gradients])
        torch._foreach_sub_(values, [self.own.parts[p] for p in gradients])

    def _correct_moments(
        self, optimizer: torch.optim.Optimizer, gradients: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        """Change first moments so that m = β₁ m + (1 − β₁) g becomes β₁ m + (1 − β₁) (g + c − cr).

        That is by (c − cr) (1 − β₁) / β₁, of which the sign is the other one where the optimizer
        maximizes, and uses −g. Without moments, as β₁ is 0, gradients are corrected. Parameters
        whose moments are still to be made have no variates yet.
        """
        for group in optimizer.param_groups:
            beta = float(group["betas"][0])
            members = [p for p in group["params"] if p in gradients]
            if beta == 0:
                if members:
                    self._correct({p: gradients[p] for p in members})
                continue
            members = [p for p in members if "exp_avg" in optimizer.state.get(p, {})]
            if members:
                moments = [optimizer.state[p]["exp_avg"] for p in members]
                factor = (1 - beta) / beta
                if group.get("maximize"):
                    factor = -factor
                torch._foreach_add_(moments, [self.mean.parts[p] for p in members], alpha=factor)
                torch._foreach_add_(moments, [self.own.parts[p] for p in members], alpha=-factor)

    @torch.no_grad()
    def after_step(self) -> None:
        """After every τ-th step let cr be the mean of the gradients since, if that is finite.

        The change of cr is added to c; `_sum` has the former cr until the call has returned.
        """
        if self._count < self._steps:
            return
        ends = [end for vector in self._sum.memory for end in torch.aminmax(vector)]
        finite = torch.stack([end.isfinite() for end in ends]).all()
        for total, own in zip(self._sum.memory, self.own.memory, strict=True):
            torch.where(finite, total.div_(self._count), own, out=total)
        self._take_new()
        self.mean.add(self.own)
        self.mean.add(self._sum, -1.0)
        self._count = 0
        self._excluded = 0

    def _take_new(self) -> None:
        self.own, self._sum = self._sum, self.own

    # A call

    def begin_call(self, memory: list[torch.Tensor], excluded: Callable[[], int]) -> None:
        """Note how often this rank was excluded, and its c if that will be replaced."""
        if self._excluded >= 0:
            self._excluded = excluded()
        if self.replaced and not all(bool(vector.isfinite().all()) for vector in memory):
            self._before = [vector.clone() for vector in self.mean.memory]

    def end_call(self, excluded: Callable[[], int]) -> None:
        """Take back the change of cr if it was excluded; follow c if that was replaced.

        A rank of weight 0 gets the others' mean in place of its c. If its cr changes as its c does,
        both sums over all ranks stay equal, however many ranks were excluded.
        """
        if self._before is not None:
            for own, mean, before in zip(
                self.own.memory, self.mean.memory, self._before, strict=True
            ):
                own.add_(mean).sub_(before)
            self._before = None
        if self._excluded >= 0:
            self._end_period(taken=self.replaced or excluded() == self._excluded)

    def _end_period(self, *, taken: bool) -> None:
        if self._excluded < 0:
            return
        if taken:
            self.renewed = True
        else:
            self._take_new()
        self._sum.zero()
        self._excluded = -1

    # What happens between steps

    def leave(self) -> None:
        """Take cr out of c."""
        self.mean.add(self.own, -1.0)
        self.own.zero()
        self._restart()

    def joined(self) -> None:
        """Let cr be c, as that is the same on all ranks now."""
        self.own.copy(self.mean)
        self._restart()

    def _restart(self) -> None:
        self.renewed = True
        self._sum.zero()
        self._count = 0
        self._excluded = -1

    def state_dict(self) -> dict[str, Any]:
        """Return copies of c, cr and the sum of the gradients since, and their number."""
        copies = [[v.clone() for v in each.memory] for each in (self.mean, self.own, self._sum)]
        return dict(zip(("mean", "own", "sum"), copies, strict=True)) | {"count": self._count}

    def loaded(self, state: dict[str, Any] | None) -> None:
        """Put c, cr and the sum into their vectors; zeros if they were not saved."""
        self._restart()
        for name, each in (("mean", self.mean), ("own", self.own), ("sum", self._sum)):
            if state is None:
                each.zero()
            else:
                for vector, value in zip(each.memory, state[name], strict=True):
                    vector.copy_(value)
        self._count = 0 if state is None else state["count"]

    def release(self) -> None:
        """Free the vectors."""
        empty = Variate([], {})
        self.mean = self.own = self._sum = empty
        self.memory = []
