"""An average that is pending while the application computes with the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wagma.optim.flat import FlatModel, Tensor
from wagma.optim.vectors import for_collective, let_wait

if TYPE_CHECKING:
    from collectives import GroupAllreduce
    from collectives.engine.calls import Call
    from collectives.result import Result


class Overlap:
    """At most one pending call of a collective, which averages a copy of the model.

    Further vectors may be averaged with the model; the average replaces them as well. When the
    average arrives it replaces the trained parameters, which must not have changed meanwhile.
    Buffers, such as BatchNorm's statistics, and frozen parameters become the average plus their
    changes meanwhile. Memory: a copy of the model, and one more of buffers and frozen parameters.

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
        """Begin to average the model as it is now, with this weight and work."""
        for copy, vector in zip(self._average, self._memory, strict=True):
            copy.copy_(vector)
        averaged = self._flat.averaged
        self._trained = [tensor for tensor in averaged if tensor.value.requires_grad]
        others = [tensor.value for tensor in averaged if not tensor.value.requires_grad]
        self._others = [(value, value.clone()) for value in others]
        device = self._flat.device
        self._stream = torch.get_device_module(device).current_stream(device)
        self.resume(self._collective.start(self._vectors, **given))

    def resume(self, call: Call | None) -> None:
        """Let `take` put this call's average into the model, which is unchanged since its start."""
        self.call = call
        if call is not None:
            self._versions = [tensor.value._version for tensor in self._trained]

    def changed(self) -> Tensor | None:
        """Return a trained parameter that has changed since the start, which `take` would undo."""
        pairs = zip(self._trained, self._versions, strict=True)
        return next((t for t, version in pairs if t.value._version != version), None)

    def drop(self) -> Result:
        """Wait for the call, leave the model as it is, and return the `Result`."""
        call, self.call = self.call, None
        assert call is not None
        return call.wait()

    def take(self) -> Result:
        """Wait for the call, put the average into the model, and return the `Result`."""
        try:
            return self.drop()
        finally:  # the collective relies on it, even if the call was interrupted
            let_wait(self._flat.device, self._stream)
            self._put()

    @torch.no_grad()
    def _put(self) -> None:
        changes = [(value, value - before) for value, before in self._others]
        for vector, average in zip(self._memory, self._average, strict=True):
            vector.copy_(average)
        for value, change in changes:
            value.add_(change.nan_to_num(0, 0, 0))
        self._flat.mark_changed()
