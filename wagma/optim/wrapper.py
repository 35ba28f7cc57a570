"""An optimiser around the user's optimiser, for methods that add communication to it."""

from __future__ import annotations

from typing import Any

import torch


class Wrapper(torch.optim.Optimizer):
    """The wrapped optimiser seen through an object whose `step` a method replaces.

    Parameter groups, state and defaults *are* the wrapped optimiser's, not copies, so that
    learning-rate schedulers, `GradScaler` and checkpoints work with either object.
    """

    # GradScaler would hand its scale to this object, where the wrapped one does not look for it.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: torch.optim.Optimizer):
        # Not super().__init__(): it would build a second set of groups, state and hooks.
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:
        """What else an optimiser has, such as its hooks, is the wrapped one's."""
        if name == "optimizer":  # not yet set: looking it up would recurse
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients: `torch.optim.Optimizer.zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimiser's state, as returned by `state_dict`."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimiser."""
        self.optimizer.add_param_group(param_group)
