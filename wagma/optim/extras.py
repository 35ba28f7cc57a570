"""What an optimizer can average in addition to the model: the base class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from wagma.optim.vectors import DeviceVector, for_collective

if TYPE_CHECKING:
    import numpy as np


class Extra:
    """Vectors that a collective averages in addition to the model, and this rank's part in that.

    Attributes:
        memory: list of the vectors, as 1-D tensors of zeros at first.
        period: versions from one that averages them to the next; 0: only averages over all ranks.
        part: vectors like these, with what this rank has put into them that counts only while it
            publishes; [] if there is no such part.
        renewed: whether the part has changed since this was last set to False.
    """

    period = 1
    renewed = False

    memory: list[torch.Tensor]

    @property
    def part(self) -> list[torch.Tensor]:
        return []

    @property
    def vectors(self) -> list[np.ndarray | DeviceVector]:
        """The vectors, for collectives."""
        return list(map(for_collective, self.memory))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Use or change the gradients, of which this local optimizer makes a step next."""

    def after_step(self) -> None:
        """Put into the vectors what the local optimizer's step has changed."""

    def begin_call(self, memory: list[torch.Tensor], excluded: Callable[[], int]) -> None:
        """Note what a call of the collective begins with.

        Args:
            memory: all vectors that it averages, also those of the model; none if it averages
                none.
            excluded: returns how many of this rank's vectors the collective has excluded so far.
        """

    def end_call(self, excluded: Callable[[], int]) -> None:
        """Go on from what the call has returned; `excluded` as for `begin_call`."""

    def changed(self, on_host: list[Any] | None) -> None:
        """Go on from other contents of the vectors.

        Args:
            on_host: copies of these vectors in the host's memory; None: there are none.
        """

    def leave(self) -> None:
        """Put into the vectors what this rank leaves, as it makes no more steps until all join."""

    def joined(self) -> None:
        """Go on from vectors that all ranks have, after `join`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved of this besides the optimizer's state."""
        return {}

    def loaded(self, state: dict[str, Any] | None) -> None:
        """Put a loaded state into the vectors, before the collective loads these.

        Args:
            state: what `state_dict` returned; None: nothing was saved.
        """

    def release(self) -> None:
        """Free the vectors, when the averager is closed."""
