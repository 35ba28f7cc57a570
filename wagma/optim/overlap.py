"""An average that is pending while the application computes with the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wagma.optim.flat import FlatModel
from wagma.optim.tensors import Tensor
from wagma.optim.vectors import for_collective, let_wait

if TYPE_CHECKING:
    from collectives import GroupAllreduce
    from collectives.engine.calls import Call
    from collectives.result import Result


class Overlap:
    """At most one pending call of a collective, which averages a copy of the model's vectors.

    Further vectors may be averaged with these; the average replaces them as well, when it arrives.
    The parameters must not have changed meanwhile. Memory: a copy of the model.

    Attributes:
        call: handle of the call whose average has not been put into the model yet, or None.
    """

    @torch.inference_mode(False)  # whatever the caller's mode, averages are copied from it later
    def __init__(self, flat: FlatModel, more: list[torch.Tensor], collective: GroupAllreduce):
        self._flat, self._collective = flat, collective
        self._memory = [*flat.memory, *more]
        self._average = [torch.zeros_like(vector) for vector in self._memory]
        self._vectors = list(map(for_collective, self._average))
        self.call: Call | None = None

    def start(self, **given: float) -> None:
        """Begin to average the vectors as they are now, with this weight and work."""
        for copy, vector in zip(self._average, self._memory, strict=True):
            copy.copy_(vector)
        device = self._flat.device
        self._stream = torch.get_device_module(device).current_stream(device)
        self.resume(self._collective.start(self._vectors, **given))

    def resume(self, call: Call | None) -> None:
        """Let `take` put this call's average into the vectors, unchanged since its start."""
        self.call = call
        if call is not None:
            self._versions = [tensor.value._version for tensor in self._flat.parameters]

    def changed(self) -> Tensor | None:
        """Return a parameter that has changed since the start, which `take` would undo."""
        pairs = zip(self._flat.parameters, self._versions, strict=True)
        return next((t for t, version in pairs if t.value._version != version), None)

    def drop(self) -> Result:
        """Wait for the call, leave the model as it is, and return the `Result`."""
        call, self.call = self.call, None
        assert call is not None
        return call.wait()

    @torch.no_grad()
    def take(self) -> Result:
        """Wait for the call, put the average into the vectors, and return the `Result`."""
        try:
            return self.drop()
        finally:  # the collective relies on it, even if the call was interrupted
            let_wait(self._flat.device, self._stream)
            for vector, average in zip(self._memory, self._average, strict=True):
                vector.copy_(average)
