"""Options of optimizers that average models, for ranks whose data differ."""

from __future__ import annotations

import math
from typing import Any

from collectives.settings import is_integer
from wagma.optim.control_variates import ControlVariates
from wagma.optim.extras import Extra
from wagma.optim.flat import FlatModel
from wagma.optim.local_state import LocalState, StateLayout
from wagma.optim.optimizers import Optimizers, needs_closure

CONTROL_VARIATES = "control-variates"
ALL_RANKS = "all-ranks"


class Shards:
    """What is averaged in addition to the model, as the user chose it.

    Args:
        average_state: whether the local optimizer's state is averaged: with every average of the
            model, or in every N-th version, or in averages over all ranks ("all-ranks").
        correction: "control-variates", or None.
        correction_every: 1 or "all-ranks", as for the state.
        often: whether all averages are over all ranks, or over pairs, so that neither can be rarer.

    Raises:
        TypeError, ValueError: an option is invalid.
    """

    def __init__(
        self,
        average_state: bool | int | str,
        correction: str | None,
        correction_every: int | str = 1,
        *,
        often: bool = False,
    ):
        if often and not isinstance(average_state, bool):
            raise TypeError(f"average_state must be True or False, not {average_state!r}")
        check_period("average_state", average_state)
        check_period("correction_every", correction_every)
        if correction_every not in (1, ALL_RANKS):
            raise ValueError(f"correction_every is {correction_every!r}, not 1 or {ALL_RANKS!r}")
        if correction not in (None, CONTROL_VARIATES):
            raise ValueError(f"correction is {correction!r}, not None or {CONTROL_VARIATES!r}")
        if correction is None and correction_every != 1:
            raise ValueError(f"correction_every is {correction_every!r}, but correction is None")
        self.average_state, self.correction = average_state, correction
        self._every, self._often = correction_every, often
        self._layout: StateLayout | None = None

    def look_at(self, optimizers: Optimizers) -> dict[str, str]:
        """Look at the local optimizers; return what must not differ between ranks.

        Raises:
            TypeError: its state is to be averaged, and cannot be; or its gradients are to be
                corrected, and a step computes several.
        """
        self._optimizers = optimizers
        if self.correction is not None:
            if not optimizers.given:
                raise ValueError("correction needs the optimizers whose gradients it corrects")
            for each in filter(needs_closure, optimizers.given):
                raise TypeError(
                    f"correction: {type(each).__name__} evaluates a closure several times in a "
                    "step, and a control variate is the mean of one gradient in each"
                )
        if not self.average_state:
            return {}
        self._layout = StateLayout(optimizers)
        return {"the local optimizer's state": str(self._layout)}

    @property
    def settings(self) -> dict[str, Any]:
        """The options by name."""
        settings = {"average_state": self.average_state, "correction": self.correction}
        return settings if self._often else settings | {"correction_every": self._every}

    def make(self, flat: FlatModel, steps: int, *, replaced: bool) -> list[Extra]:
        """Return what is averaged with a model.

        Args:
            flat: the model.
            steps, replaced: those of `ControlVariates`.
        """
        extras: list[Extra] = []
        if self._layout is not None:
            extras.append(LocalState(self._optimizers, flat, self._layout))
            extras[-1].period = period_of(self.average_state)
        if self.correction is not None:
            extras.append(
                ControlVariates(
                    self._optimizers,
                    flat,
                    steps=steps,
                    by_moments=self._layout is not None,
                    replaced=replaced,
                )
            )
            extras[-1].period = period_of(self._every)
        return sorted(extras, key=lambda extra: extra.period or math.inf)

    @staticmethod
    def periods(flat: FlatModel, extras: list[Extra]) -> dict[str, Any]:
        """Return in which versions vectors take part, as arguments of `GroupAllreduce`."""
        periods = [1] * len(flat.memory)
        periods += [extra.period for extra in extras for _ in extra.memory]
        return {
            "only_all_ranks": [k for k, period in enumerate(periods) if period == 0],
            "every": {k: period for k, period in enumerate(periods) if period > 1},
        }

    @staticmethod
    def leased(flat: FlatModel, extras: list[Extra]) -> list[int]:
        """Return which vectors have parts that count only while their rank publishes."""
        leased = [False] * len(flat.memory)
        leased += [bool(extra.part) for extra in extras for _ in extra.memory]
        return [k for k, is_leased in enumerate(leased) if is_leased]

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


def check_period(name: str, value: bool | int | str) -> None:
    """Raise ValueError unless this tells how often something is averaged."""
    whole = not isinstance(value, str) and is_integer(value) and value >= 1
    if not (isinstance(value, bool) or whole or value == ALL_RANKS):
        raise ValueError(
            f"{name} is {value!r}, not True, False, a number of versions or 'all-ranks'"
        )


def period_of(value: bool | int | str) -> int:
    """Return a period as `Extra` has it."""
    return 0 if value == ALL_RANKS else int(value)
