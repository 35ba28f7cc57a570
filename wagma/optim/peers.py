"""What the methods share whose ranks average models with a few others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wagma.optim.averaging import Averaging


class PeerAveraging(Averaging):
    """Take the local optimizer's step, then let the method's collective average the model.

    What holds for all methods is said in `Averaging`. The local optimizer's state stays each
    rank's own, no step has a weight, and a model that is not finite changes nobody else's. What
    travels is parameters and floating-point buffers alike.
    """

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step of the wrapped optimizer, then call the collective with the model."""
        if weight != 1:
            raise ValueError(
                f"weight is {weight:g}, but all ranks count the same in {type(self).__name__}"
            )
        loss = self._local_step(closure)
        self._average_model()
        return loss
