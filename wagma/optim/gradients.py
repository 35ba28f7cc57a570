"""The base class of methods that average gradients before a step of the local optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from wagma.optim.averaging import Averaging
from wagma.optim.flat import FlatModel, dense_gradient
from wagma.optim.survival import equalize
from wagma.optim.vectors import DeviceVector, for_collective, new_vector
from wagma.optim.wrapper import needs_closure


class FlatGradients:
    """The gradients of a flat model's parameters, as vectors in that model's layout.

    They cover all parameters: one without a gradient counts as zeros, and the last vector counts
    the ranks that have one. The parts of buffers hold zeros, so that a collective that averages
    gradients can average the model as well.

    Attributes:
        vectors: list of 1-D arrays for collectives: one for each of `FlatModel.vectors`, of its
            dtype and length, and one of float32 with an element for each parameter: 1 if it has a
            gradient on this rank, else 0; after averaging, the share of ranks that have one.
        own: list of whether each parameter has a gradient on this rank, and it is not excluded.
    """

    @torch.inference_mode(False)  # whatever the caller's mode, gradients are copied into them later
    def __init__(self, flat: FlatModel):
        self._memory, self._parameters = [], []
        for dtype in flat.dtypes:
            tensors = flat.of(dtype)
            vector, parts = new_vector([tensor.value for tensor in tensors], zeros=flat.zeros)
            self._memory.append(vector)
            self._parameters += [
                pair for pair in zip(tensors, parts, strict=True) if "parameter" in pair[0].kind
            ]
        self.own = [False] * len(self._parameters)
        self._present = flat.zeros(len(self.own), dtype=torch.float32, device=flat.device)
        self._memory.append(self._present)
        self._flags, self._flags_of = self._present.clone(), self.own
        self.vectors = list(map(for_collective, self._memory))

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the gradients from the parameters' `.grad`.

        Raises:
            TypeError: one of them is sparse.
        """
        for tensor, view in self._parameters:
            gradient = dense_gradient(tensor)
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        self.own = [tensor.value.grad is not None for tensor, _ in self._parameters]
        if self.own != self._flags_of:  # rarely: a copy from the host may wait for the device
            self._flags_of = self.own
            self._flags = torch.tensor(self.own, dtype=torch.float32).to(
                self._present.device, non_blocking=True
            )
        self._present.copy_(self._flags)

    def spoil(self) -> None:
        """Make the vectors non-finite, so that the collective excludes them."""
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
            elif value.grad is None:
                value.grad = view.clone()
            else:
                value.grad.copy_(view)


class GradientAveraging(Averaging):
    """Average gradients between ranks, then take a step of the local optimizer with the mean.

    A parameter without a gradient on this rank gets the mean if any rank has a gradient for it, and
    is unchanged otherwise, so that equal models stay equal. BatchNorm's statistics differ between
    ranks, and are averaged in `averaged()` and `synchronize()`.

    A closure is called once, before the gradients are averaged; the wrapped optimizer's step is
    taken without it. An optimizer that evaluates it several times per step is refused.

    A rank whose gradients are not finite, whether or not a `GradScaler` finds that, is excluded
    from the mean, and uses the others' like every rank; if no rank's are finite, no rank takes a
    step.
    """

    _simulated_vectors = 4
    _gradients: FlatGradients

    def _check_settings(self, optimizer: torch.optim.Optimizer, **settings: Any) -> dict[str, Any]:
        if isinstance(optimizer, torch.optim.Optimizer) and needs_closure(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} evaluates a closure several times in a step, and "
                f"{type(self).__name__} could not average the gradients of each evaluation: "
                "average models instead, as LocalSGD and WAGMA do"
            )
        return {}

    @property
    def _vectors(self) -> list[np.ndarray | DeviceVector]:
        return self._gradients.with_model(self.flat)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps inside, as `Averaging.join` does; collective.

        In addition to the model, ranks that made fewer steps get the state and settings of the
        local optimizer of a rank that made the most, since equal steps need equal momentum.

        Raises:
            RuntimeError: MPI was initialized without the thread level MULTIPLE.
        """
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(f"join() of {type(self).__name__} needs MPI's THREAD_MULTIPLE")
        with super().join():
            yield

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        made = self.collective.version
        with self._joining_collective():
            yield
        if self._survival is None:
            self._meet("join()")  # a rank may have failed since the others have joined
        equalize(self.comm, self.optimizer, self.comm.allgather(made))

    @contextmanager
    def _joining_collective(self) -> Iterator[None]:
        """Take part in the others' averages, then take the model of a rank with the most steps."""
        with super()._taking_part():
            yield

    def _compute_gradients(self, closure: Callable[[], Any] | None) -> Any:
        """Call the closure, if there is one, and collect the gradients; return the closure's loss.

        Gradients that a GradScaler found to be infinite make the vectors non-finite; others are
        unscaled.
        """
        self._check_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        finite = self._unscale_gradients()
        self.flat.check_places()
        self._gradients.fill()
        if not finite:
            self._gradients.spoil()
        return loss
