"""The base class of methods in which a rank averages its model with a few others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wagma.optim.averaging import Averaging


class PeerAveraging(Averaging):
    """Take the local optimizer's step, then let the method's collective average the model.

    `Averaging` describes what all methods share. The local optimizer's state is not averaged, steps
    have no weight, and a model that is not finite does not change others. Parameters and
    floating-point buffers are sent alike.
    """

    _simulated_vectors = 5  # with some that are in messages

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step of the wrapped optimizer, then call the collective with the model."""
        if weight != 1:
            raise ValueError(
                f"weight is {weight:g}, but all ranks have the same weight in {type(self).__name__}"
            )
        loss = self._local_step(closure)
        self._average_model()
        return loss
