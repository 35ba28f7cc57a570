"""A wrapper of the user's optimizer, for methods that add communication to it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle


class Wrapper(torch.optim.Optimizer):
    """An object that stands for the wrapped optimizer, with another `step`.

    Parameter groups, state, defaults and hooks *are* the wrapped optimizer's, not copies, so
    learning-rate schedulers and checkpoints work with either object. Only this object makes steps,
    also for `GradScaler.step`: until it is closed, the wrapped optimizer's own `step` raises.

    Attributes:
        optimizer: the wrapped optimizer.
        closed: whether the method has ended, so that the wrapped optimizer is free again.
    """

    # This makes GradScaler call `step` even if it found infinite gradients, because ranks that
    # count their steps must not skip one; it reports them in `found_inf` and `grad_scale`.
    _step_supports_amp_scaling = True

    closed = False

    def __init__(self, optimizer: torch.optim.Optimizer):
        # Not super().__init__(): it would build a second set of groups, state and hooks.
        self.optimizer = optimizer
        self._stepping = False
        self._refusal: RemovableHandle | None = None
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # else it is a wrapper without hooks
            self._refusal = refuse_alone(optimizer, weakref.ref(self))

    def _let_go(self) -> None:
        """Let the wrapped optimizer be used by itself."""
        if self._refusal is not None:
            self._refusal.remove()

    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, groups: setattr(self.optimizer, "param_groups", groups),
    )
    state = property(
        lambda self: self.optimizer.state,
        lambda self, state: setattr(self.optimizer, "state", state),
    )
    defaults = property(lambda self: self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes, such as hooks, of the wrapped optimizer."""
        if name == "optimizer":  # not yet set: looking it up would recurse
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} optimizer cannot be copied or pickled, because it holds a communicator: "
            "save its state_dict(), or copy the optimizer that it wraps"
        )

    def _local_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, unless a GradScaler requests to skip it.

        Gradients that the GradScaler has not unscaled yet are unscaled first, in place.

        Args:
            closure: for the wrapped optimizer's `step`; not possible with a GradScaler.

        Returns:
            The result of that `step`, None if it was skipped.

        Raises:
            RuntimeError: a closure with a GradScaler, which cannot see its gradients.
        """
        self._check_closure(closure)
        return self._bare_step(closure) if self._unscale_gradients() else None

    def _check_closure(self, closure: Callable[[], Any] | None) -> None:
        """Raise RuntimeError for a closure with a GradScaler, which cannot see its gradients."""
        if closure is not None and "found_inf" in vars(self):
            raise RuntimeError("GradScaler does not support closures")

    def _unscale_gradients(self) -> bool:
        """Unscale gradients scaled by a GradScaler; return False if one is infinite."""
        if bool(vars(self).get("found_inf")):
            return False
        scale = vars(self).get("grad_scale")
        if scale is not None:
            unscale(self.param_groups, float(scale))
        return True

    def _bare_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step unchanged, and return its result."""
        self._stepping = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self._stepping = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, to None or by `set_to_none=False` to 0."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state: what the method `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameter group `param_group` to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)


def refuse_alone(
    optimizer: torch.optim.Optimizer, wrapper: weakref.ref[Wrapper]
) -> RemovableHandle:
    """Make the optimizer's own step raise while its wrapper is open; return what ends that."""

    def refuse(*_: Any) -> None:
        outside = wrapper()
        if outside is not None and not (outside._stepping or outside.closed):
            raise RuntimeError(
                f"step the {type(outside).__name__} optimizer, not the one that it wraps, whose "
                "step would not be averaged"
            )

    return optimizer.register_step_pre_hook(refuse)


def unscale(param_groups: list[dict[str, Any]], scale: float) -> None:
    """Divide the gradients by the scale, in place; raise ValueError for float16, as torch does."""
    with torch.no_grad():
        for group in param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.dtype is torch.float16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    parameter.grad.mul_(1 / scale)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure, as LBFGS's does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
