"""The gradients of a model as vectors, for methods that average them before an update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from wagma.optim.flat import FlatModel, as_real, dense_gradient
from wagma.optim.tensors import Tensor
from wagma.optim.vectors import DeviceVector, for_collective, new_vector


class FlatGradients:
    """The gradients of a flat model's parameters, as vectors in that model's layout.

    They cover all parameters: one without a gradient counts as zeros, and the last vector counts
    the ranks that have one. The vectors of buffers hold zeros, so that a collective that averages
    gradients can average the model as well.

    Attributes:
        vectors: list of 1-D arrays for collectives: one for each of `FlatModel.vectors`, of its
            dtype and length, and one of float32 with an element for each parameter: 1 if it has a
            gradient on this rank, else 0; after averaging, the share of ranks that have one.
        own: list of whether each parameter has a gradient on this rank, and it is not excluded.
    """

    @torch.inference_mode(False)  # whatever the caller's mode, gradients are copied into them later
    def __init__(self, flat: FlatModel):
        self._memory: list[torch.Tensor] = []
        self._parameters: list[tuple[Tensor, torch.Tensor]] = []
        for dtype in flat.dtypes:
            tensors = flat.of(dtype)
            values = [as_real(tensor.value) for tensor in tensors]
            vector, parts = new_vector(values, zeros=flat.zeros)
            self._memory.append(vector)
            self._parameters += zip(tensors, parts, strict=True)
        self._memory += [
            flat.zeros(flat.memory[k].numel(), dtype=flat.memory[k].dtype, device=flat.device)
            for k in flat.by_value
        ]
        self.own = [False] * len(self._parameters)
        self._present = flat.zeros(len(self.own), dtype=torch.float32, device=flat.device)
        self._memory.append(self._present)
        self._flags, self._flags_of = self._present.clone(), self.own
        self.vectors = list(map(for_collective, self._memory))

    @torch.no_grad()
    def fill(self, finite: bool = True) -> None:
        """Copy the gradients from the parameters' `.grad`; make them not finite if they are not.

        Raises:
            TypeError: one of them is sparse.
        """
        for tensor, view in self._parameters:
            gradient = dense_gradient(tensor)
            if gradient is None:
                view.zero_()
            else:
                view.copy_(as_real(gradient.resolve_conj()))
        self.own = [tensor.value.grad is not None for tensor, _ in self._parameters]
        if self.own != self._flags_of:  # rarely: a copy from the host may wait for the device
            self._flags_of = self.own
            self._flags = torch.tensor(self.own, dtype=torch.float32).to(
                self._present.device, non_blocking=True
            )
        self._present.copy_(self._flags)
        if not finite:  # so that the collective excludes them
            self._present.fill_(torch.nan)
            self.own = [False] * len(self.own)

    def multiply(self, weight: float) -> None:
        """Multiply the vectors by a number, rounded to their dtypes."""
        for vector in self._memory:
            vector.mul_(torch.tensor(weight, dtype=vector.dtype, device="cpu").item())

    def divide(self, number: int) -> None:
        """Divide the gradients by a number."""
        for vector in self._memory[:-1]:
            vector.div_(number)

    def clear(self) -> None:
        """Set the vectors to 0."""
        for vector in self._memory:
            vector.zero_()

    def with_model(self, flat: FlatModel) -> list[np.ndarray | DeviceVector]:
        """Return the model's vectors in this layout, with zeros in place of the counts."""
        return [*flat.vectors, for_collective(torch.zeros_like(self._present))]

    def shares(self, collective: Any) -> np.ndarray:
        """Return the share of ranks that have a gradient for each parameter, after averaging.

        It is read from the host's copy if the collective averages there, without waiting for a
        device. On a device it arrives with the average, for which the step waits anyway.
        """
        if collective.path == "direct":
            return self._present.cpu().numpy()
        vectors: Any = collective.on_host if collective.path == "staged" else self.vectors
        shares: np.ndarray = vectors[-1]
        return shares

    @torch.no_grad()
    def write_back(self, present: Iterable[Any]) -> None:
        """Copy the vectors to `.grad` of the parameters whose `present` is not 0."""
        for (tensor, view), is_present in zip(self._parameters, present, strict=True):
            value = tensor.value
            if not is_present:  # also if this rank has one that was excluded
                value.grad = None
                continue
            if value.grad is None or value.grad.is_conj():
                value.grad = torch.empty_like(value)
            as_real(value.grad).copy_(view)
