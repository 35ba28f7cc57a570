"""When averages are made: the steps of the user's optimizers, which stay what they are.

An optimizer's `step` is replaced on the object, as torch's schedulers do it, so that gradients can
be averaged before all of its hooks, and models after them. A caller that has kept the method from
before is heard by hooks of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from collectives.settings import checked_weight
from collectives.timeline import is_recording, span

if TYPE_CHECKING:
    from wagma.optim.averaging import Averaging

SCALING = "_step_supports_amp_scaling"  # lets a GradScaler call `step` also where it skips a step


class Steps:
    """Hears of the steps of an averager's optimizers, and has it do its part of each.

    Several optimizers make one step of the averager: it begins with the first one's, and ends when
    all have made theirs. A step that a `GradScaler` skips counts; it is told the optimizer by
    `grad_scale` and `found_inf`.

    Args:
        averager: the averager.
        optimizers: those that it was given.
    """

    def __init__(self, averager: Averaging, optimizers: tuple[torch.optim.Optimizer, ...]):
        self._averager: Averaging | None = averager  # None: closed
        self._optimizers = optimizers
        self._made: set[int] = set()  # of this step
        self._inside = False  # a step that is heard of
        self._goes = True  # whether the optimizers make their part of this step
        self._together = averager.averages_gradients and len(optimizers) > 1
        self.heard = False  # whether any optimizer has made a step
        self._undo: list[Callable[[], None]] = []
        # Not to be traced where a step is compiled, whose own part may be. Optimizers have loaded
        # what this needs.
        uncompiled = torch.compiler.disable if optimizers else lambda function: function
        self._before, self._after = uncompiled(self._begin), uncompiled(self._end)
        for optimizer in optimizers:
            self._listen(optimizer)

    def _listen(self, optimizer: torch.optim.Optimizer) -> None:
        for name, value in (("step", self._replacement(optimizer)), (SCALING, True)):
            before = vars(optimizer).get(name)
            setattr(optimizer, name, value)
            self._undo.append(functools.partial(put_back, optimizer, name, value, before))
        if "_optimizer_step_pre_hooks" not in vars(optimizer):  # it has not called torch's __init__
            return
        pre = optimizer.register_step_pre_hook(self._begins_unseen)
        post = optimizer.register_step_post_hook(self._ends_unseen)
        self._undo += [pre.remove, post.remove]

    @property
    def missing(self) -> str:
        """The names of optimizers that have still to make their part of a step begun by others."""
        left = [type(o).__name__ for o in self._optimizers if id(o) not in self._made]
        return ", ".join(left) if self._made else ""

    def forget(self) -> None:
        """Begin no step where one has been begun."""
        self._made = set()

    def close(self) -> None:
        """Leave nothing in the optimizers."""
        self._averager = None
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Do not hear of the steps in the block."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _replacement(self, optimizer: torch.optim.Optimizer) -> MethodType:
        original = optimizer.step

        @functools.wraps(getattr(original, "__func__", original))
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._averager is None or self._inside:
                return original(*args, **kwargs)
            if not is_recording():  # torch.compile loses what was set before a block
                return self._around(optimizer, original, args, kwargs)
            with span("step"):
                return self._around(optimizer, original, args, kwargs)

        return MethodType(step, optimizer)

    @property
    def _open(self) -> Averaging:
        assert self._averager is not None
        return self._averager

    def _around(
        self,
        optimizer: torch.optim.Optimizer,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        averager = self._open
        args, kwargs, closure = taken_apart(args, kwargs)
        loss, begun = None, False
        self._inside = True
        try:
            with unscaled(optimizer, closure, self._together) as finite:
                loss, begun = self._before(optimizer, closure, finite), True
                if not averager.averages_gradients:
                    if finite:
                        more = () if closure is None else (self._completed(optimizer, closure),)
                        loss = original(*more, *args, **kwargs)
                elif self._goes:
                    try:
                        returned = original(*args, **kwargs)
                    except Exception as error:
                        if closure is None:
                            raise
                        raise RuntimeError(
                            f"{type(averager).__name__} calls a closure once, and takes the step "
                            f"of {type(optimizer).__name__} without it, which failed: average each "
                            "gradient by averager.average_gradients() instead"
                        ) from error
                    loss = returned if closure is None else loss
        except BaseException:
            if begun and averager.averages_gradients:  # the average is of a step that has ended
                self._made = set()
            raise
        finally:
            self._inside = False
        self._after(optimizer, loss)
        return loss

    def _begin(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, finite: bool
    ) -> Any:
        """Do what comes before an optimizer's step; return the loss if that was computed."""
        averager = self._open
        if not self._made:
            self.begin()
        self.heard = True
        if not averager.averages_gradients:
            if closure is None and finite:
                self.before_update(optimizer)
            return None
        if self._made:
            if closure is not None or id(optimizer) in self._made:
                what = "a closure" if closure is not None else "a second step of one of them"
                raise RuntimeError(
                    f"{what} with several optimizers, whose gradients {type(averager).__name__} "
                    "averages before the first one's step: compute all of them before that, once"
                )
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._goes = averager._average_gradients(averager.weight, finite)
        return loss

    def _end(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """Do what comes after the step, if all optimizers have made theirs."""
        self._made.add(id(optimizer))
        if len(self._made) == len(self._optimizers):
            self._made = set()
            self.end(loss)

    # The parts of a step, also of one that is told

    def begin(self) -> None:
        """Begin a step, before any optimizer makes its own."""
        averager = self._open
        averager._check_usable()
        averager._check_weight(averager.weight)
        averager.flat.check_members(averager.optimizers.param_groups)
        averager.results, averager._are_equal = [], False
        if averager._recording is not None:
            averager._recording.step_begins()
        averager.complete()
        averager.optimizers.begin_step()
        averager._watch.begin_step()

    def end(self, loss: Any, weight: float | None = None) -> None:
        """Average after all optimizers have made their steps."""
        averager = self._open
        for extra in averager._extras:
            extra.after_step()
        given = averager.weight if weight is None else checked_weight(weight)
        if weight is not None:
            averager._check_weight(given)
        averager._average(given)
        averager.steps += 1
        if averager._recording is not None:
            averager._recording.step_ends(loss)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what comes before an optimizer's update, with its gradients."""
        self._open._watch.suspect(self._open.optimizers.before_update())
        for extra in self._open._extras:
            extra.before_step(optimizer)

    def _completed(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return a closure whose gradients the optimizer's step may use."""

        def compute() -> Any:
            loss = closure()
            self.before_update(optimizer)
            return loss

        return compute

    # Steps by a method that was kept from before

    def _begins_unseen(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._averager is None or self._inside:
            return None
        rest, others, closure = taken_apart(args[1:], kwargs)  # the first one is the optimizer
        with unscaled(optimizer, closure, self._together) as finite:
            loss = self._before(optimizer, closure, finite)
        gradients = self._averager.averages_gradients
        if not (self._goes if gradients else finite):
            # Torch's optimizers skip parameters without a gradient.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        if closure is None:
            return None
        first = (lambda: loss) if gradients else self._completed(optimizer, closure)
        return (args[0], first, *rest), others

    def _ends_unseen(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._averager is not None and not self._inside:
            self._after(optimizer, None)


def taken_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[], Any] | None]:
    """Return a step's arguments without its closure, and that."""
    if args:
        return args[1:], kwargs, args[0]
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return args, rest, kwargs.get("closure")


@contextmanager
def unscaled(optimizer: Any, closure: Callable[[], Any] | None, together: bool) -> Iterator[bool]:
    """Unscale gradients scaled by a GradScaler; yield whether it has found them to be finite.

    In the block the optimizer does not know of it.

    Args:
        optimizer, closure: those of the step.
        together: whether gradients of several optimizers are averaged now.

    Raises:
        RuntimeError: a closure with a GradScaler, which cannot see its gradients; or the others'
            are still scaled.
    """
    told = {name: vars(optimizer).pop(name, None) for name in ("found_inf", "grad_scale")}
    if told["found_inf"] is None:
        yield True
        return
    if closure is not None:
        raise RuntimeError("GradScaler does not support closures")
    if together and told["grad_scale"] is not None:
        raise RuntimeError(
            "gradients of several optimizers are averaged together: call "
            "scaler.unscale_(optimizer) for each before the first one's step"
        )
    finite = not bool(told["found_inf"])
    if finite and told["grad_scale"] is not None:
        unscale(optimizer.param_groups, float(told["grad_scale"]))
    try:
        yield finite
    finally:
        optimizer.found_inf = optimizer.grad_scale = None  # the GradScaler deletes both


def unscale(param_groups: list[dict[str, Any]], scale: float) -> None:
    """Divide the gradients by the scale, in place; raise ValueError for float16, as torch does."""
    with torch.no_grad():
        for group in param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.dtype is torch.float16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    parameter.grad.mul_(1 / scale)


def put_back(optimizer: Any, name: str, value: Any, before: Any) -> None:
    """Undo the setting of an attribute, unless it was set anew since."""
    if vars(optimizer).get(name) is not value:
        return
    if before is None:
        delattr(optimizer, name)
    else:
        setattr(optimizer, name, before)
