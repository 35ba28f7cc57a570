"""Options of optimizers that average models, for ranks whose data differ."""

from __future__ import annotations

from typing import Any

import torch

from wagma.optim.control_variates import ControlVariates
from wagma.optim.extras import Extra
from wagma.optim.flat import FlatModel
from wagma.optim.local_state import LocalState, StateLayout

CONTROL_VARIATES = "control-variates"


class Shards:
    """What is averaged in addition to the model, as the user chose it.

    Args:
        average_state: whether the local optimizer's state is averaged.
        correction: "control-variates", or None.

    Raises:
        TypeError, ValueError: an option is invalid.
    """

    def __init__(self, average_state: bool, correction: str | None):
        if not isinstance(average_state, bool):
            raise TypeError(f"average_state must be True or False, not {average_state!r}")
        if correction not in (None, CONTROL_VARIATES):
            raise ValueError(f"correction is {correction!r}, not None or {CONTROL_VARIATES!r}")
        self.average_state, self.correction = average_state, correction
        self._layout: StateLayout | None = None

    def look_at(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Look at the local optimizer; return what must not differ between ranks.

        Raises:
            TypeError: its state is to be averaged, and cannot be.
        """
        self._optimizer = optimizer
        if not self.average_state:
            return {}
        self._layout = StateLayout(optimizer)
        return {"the local optimizer's state": str(self._layout)}

    @property
    def settings(self) -> dict[str, Any]:
        """The options by name."""
        return {"average_state": self.average_state, "correction": self.correction}

    def make(self, flat: FlatModel, period: int, *, replaced: bool) -> list[Extra]:
        """Return what is averaged with a model.

        Args:
            flat: the model.
            period, replaced: those of `ControlVariates`.
        """
        extras: list[Extra] = []
        if self._layout is not None:
            extras.append(LocalState(self._optimizer, flat, self._layout))
        if self.correction is not None:
            extras.append(
                ControlVariates(
                    self._optimizer,
                    flat,
                    period=period,
                    by_moments=self.average_state,
                    replaced=replaced,
                )
            )
        return extras

    def check_weight(self, weight: float) -> None:
        """Raise ValueError if steps cannot have this weight, with which the sum of cr changes."""
        if self.correction is not None and weight != 1:
            raise ValueError(
                f"weight is {weight:g}, but with correction={self.correction!r} all ranks have the "
                "same weight"
            )

    def check_weights(self, weights: str) -> None:
        """Raise ValueError if models cannot be weighted in this way."""
        if self.correction is not None and weights != "given":
            raise ValueError(f"correction={self.correction!r} needs weights='given'")
