"""A model as one vector per dtype, which all methods of this package average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from collectives.agreement import agreed
from collectives.memory import device_caches
from wagma.optim.tensors import (
    AVERAGED,
    HALVES,
    OWN,
    Tensor,
    is_expanded,
    named_tensors,
    numbered,
    place,
)
from wagma.optim.vectors import DeviceVector, for_collective, new_vector

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

PIECE = 1 << 20  # elements of half precision that are converted at a time


class Saved(NamedTuple):
    """Copies of a model's values: see `FlatModel.save`."""

    vectors: list[torch.Tensor]
    buffers: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]  # home, tensor, copy


class Slots(NamedTuple):
    """The vector of buffers of one dtype, and one of what they hold now, with parts for each."""

    vector: torch.Tensor
    parts: list[torch.Tensor]
    held: torch.Tensor
    held_parts: list[torch.Tensor]
    buffers: list[Tensor]


class FlatModel:
    """A model whose averaged tensors are parts of one contiguous vector for each dtype.

    Parameters become parts of the vectors of their dtypes. With `wide`, those of half precision
    have a vector of float32 beside that, which is averaged in its place: `give` adds their changes
    to it, and `take` rounds it to them, so that no update is lost because it is small beside the
    mean. Memory: 4 bytes for each element of half precision.

    Buffers keep their memory, and may be replaced. `give` copies their finite elements to vectors
    of their own, at the end, and `take` copies these back, except where a buffer is infinite: a
    mask of −inf stays as it is. Elements that are NaN become the average of the others'.

    Each parameter has a storage of its own, which is its part of the vector, so that saving or
    copying some of them does not include the others. `release` gives them memory of their own.

    Attributes:
        model: the `torch.nn.Module`.
        tensors: list of the model's `Tensor`s, also of those that are not averaged.
        parameters, buffers: lists of the averaged ones.
        device: the `torch.device` that these are on.
        memory: list of the vectors as 1-D tensors: of parameters, then of buffers.
        vectors: the same for collectives: numpy arrays, with bfloat16 from ml_dtypes, or
            `DeviceVector`s on a CUDA device. Each tensor starts at a multiple of 64 bytes; the gaps
            hold zeros. Empty after `release`.
        by_value: the indices of the vectors of buffers.
        dtypes: list of the `torch.dtype`s of the parameters.
        zeros: function that makes vectors that are averaged, as `torch.zeros` does.
        overlaps: whether buffers may change between `give` and `take`.
    """

    overlaps = False

    @torch.inference_mode(False)  # whatever the caller's mode, the views must be trainable
    def __init__(
        self,
        model: torch.nn.Module,
        tensors: list[Tensor],
        zeros: Callable[..., torch.Tensor] = torch.zeros,
        *,
        wide: bool = False,
        buffers_apart: bool = False,
    ):
        """Move the tensors, the model's survey after its broadcast, into new vectors.

        Those are what `zeros` returns. Shapes, strides and values stay, and so do the objects. With
        `buffers_apart` buffers are not in `memory`, but for `average_buffers`.
        """
        self.model, self.tensors, self.zeros = model, tensors, zeros
        averaged = [tensor for tensor in tensors if tensor.role == AVERAGED]
        self.parameters = [tensor for tensor in averaged if tensor.is_parameter]
        self.buffers = [tensor for tensor in averaged if not tensor.is_parameter]
        self.device = self.parameters[0].value.device
        self.dtypes = list(dict.fromkeys(real_dtype(each.value) for each in self.parameters))
        self.parts: dict[torch.Tensor, torch.Tensor] = {}  # of parameters, as real numbers
        self._memory = [self._flatten(dtype) for dtype in self.dtypes]
        # Vectors of half precision, and those averaged in their place.
        self._widened = [
            (vector, zeros(vector.numel(), dtype=torch.float32, device=self.device))
            for vector in self._memory
            if wide and vector.dtype in HALVES
        ]
        for vector, stand_in in self._widened:
            stand_in.copy_(vector)
        stand_ins = {id(vector): stand_in for vector, stand_in in self._widened}
        self.memory = [stand_ins.get(id(vector), vector) for vector in self._memory]
        slots: list[Slots] = []
        for dtype in dict.fromkeys(slot_dtype(each.value, wide) for each in self.buffers):
            members = [each for each in self.buffers if slot_dtype(each.value, wide) is dtype]
            values = [as_real(each.value.detach()) for each in members]
            slots.append(
                Slots(*new_vector(values, dtype, zeros), *new_vector(values, dtype), members)
            )
            torch._foreach_copy_(slots[-1].parts, values)
        self._slots, self._apart = ([], slots) if buffers_apart else (slots, [])
        self.by_value = [len(self.memory) + k for k in range(len(self._slots))]
        self.memory += [each.vector for each in self._slots]
        self.vectors: list[np.ndarray | DeviceVector] = list(map(for_collective, self.memory))
        if self.device.type != "cpu":
            # The tensors' former memory, as much as the model has, for the collective's vectors.
            device_caches.empty()
        self._unseen: Any = 0  # calls in which a buffer on a device was left out
        self._ids = {id(tensor.value) for tensor in self.parameters}
        self._places = [
            (module._parameters, attribute, tensor, tensor.value.data_ptr())
            for tensor in self.parameters
            for module, attribute in tensor.homes
        ]

    def _flatten(self, dtype: torch.dtype) -> torch.Tensor:
        """Make the parameters of a dtype parts of a new vector, and return that."""
        values = [each.value for each in self.of(dtype)]
        wide = torch.zeros if dtype in HALVES else self.zeros
        vector, parts = new_vector(list(map(as_real, values)), zeros=wide)
        for value, part in zip(values, parts, strict=True):
            part.copy_(as_real(value.detach()))
            self.parts[value] = part
            value.data = torch.view_as_complex(part) if value.is_complex() else part
        return vector

    def of(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the averaged parameters of a dtype, in their order in its vector."""
        return [each for each in self.parameters if real_dtype(each.value) is dtype]

    # Between the model and the vectors

    @torch.no_grad()
    def give(self) -> list[str]:
        """Bring the vectors up to date; return names of buffers with elements that are left out.

        Raises:
            RuntimeError: a buffer was replaced by one of another kind.
        """
        for halves, wide in self._widened:
            for begin in range(0, wide.numel(), PIECE):
                own, base = halves[begin : begin + PIECE], wide[begin : begin + PIECE]
                base += own.float() - base.to(own.dtype).float()
        return [name for slots in self._slots for name in self._fill(slots)]

    def _fill(self, slots: Slots) -> list[str]:
        """Copy the finite elements of buffers to their vector; return the names of the others."""
        torch._foreach_copy_(slots.held_parts, list(map(self._current, slots.buffers)))
        finite = slots.held.isfinite()
        if slots.held.is_cpu and bool(finite.all()):
            slots.vector.copy_(slots.held)
            return []
        slots.vector.copy_(torch.where(finite, slots.held, slots.vector))
        if not slots.held.is_cpu:  # a look would wait for the device
            self._unseen = self._unseen + ~finite.all()
            return []
        pairs = zip(slots.buffers, slots.held_parts)
        return [each.name for each, part in pairs if not bool(part.isfinite().all())]

    def unseen(self) -> list[str]:
        """Return names of buffers on a device that were left out since the last call."""
        count, self._unseen = int(self._unseen), 0
        pairs = ((each, self._current(each)) for each in self.buffers if count)
        return [each.name for each, value in pairs if not bool(value.isfinite().all())]

    @torch.no_grad()
    def take(self, share: float = 0.0) -> None:
        """Go on from what a collective has put into the vectors.

        Args:
            share: that of this rank's buffers in the average, with which their changes since `give`
                are added: they then have the weight that the former values had.
        """
        for halves, wide in self._widened:
            halves.copy_(wide)
        for slots in self._slots:
            self._put(slots, share)

    def mark_changed(self) -> None:
        """Make autograd refuse a graph built with the parameters before they changed."""
        trained = [each.value for each in self.parameters if each.value.requires_grad]
        torch.autograd.graph.increment_version(trained)

    def _put(self, slots: Slots, share: float) -> None:
        """Copy the vector of buffers to them, except where they are infinite."""
        values = list(map(self._current, slots.buffers))
        change = slots.held.clone() if share else slots.held
        torch._foreach_copy_(slots.held_parts, values)
        if share:
            torch.sub(slots.held, change, out=change)
            # Not in one operation, which rounds once on some machines.
            slots.vector.add_(change.nan_to_num_(0.0, 0.0, 0.0).mul_(share))
        torch.where(slots.held.isinf(), slots.held, slots.vector, out=slots.held)
        torch._foreach_copy_(values, slots.held_parts)

    @torch.no_grad()
    def average_buffers(self, comm: MPI.Intracomm) -> None:
        """Set buffers that are apart to their mean over all ranks, in their order; collective."""
        if self._apart:
            agreed(comm, lambda: [self._fill(slots) for slots in self._apart])
        for slots in self._apart:
            each = comm.allgather(slots.vector.cpu().numpy().copy())
            slots.vector.copy_(torch.from_numpy(np.mean(each, axis=0, dtype=each[0].dtype)))
            self._put(slots, 0.0)

    def _current(self, tensor: Tensor) -> torch.Tensor:
        """Return a buffer as it is now, as real numbers."""
        module, attribute = tensor.homes[0]
        value = module._buffers.get(attribute)
        if value is None or value.shape != tensor.value.shape or value.dtype != tensor.value.dtype:
            raise RuntimeError(
                f"buffer {tensor.name!r} was replaced by one of another shape or dtype, so it "
                "cannot be averaged: exclude it, or register it with persistent=False"
            )
        return as_real(value.detach())

    def round(self) -> None:
        """Let what is averaged in place of half precision be the model's own values, rounded."""
        for halves, wide in self._widened:
            wide.copy_(halves)

    # What a model must be

    def check(self) -> None:
        """Raise RuntimeError if the model has something to average that is not in the vectors."""
        self.check_places()
        if not self.vectors:
            return
        known = {id(tensor.value) for tensor in self.tensors}
        names = {tensor.name for tensor in self.tensors if not tensor.is_parameter}
        for tensor in named_tensors(self.model):
            is_known = tensor.name in names or id(tensor.value) in known
            if tensor.is_parameter:
                is_known = id(tensor.value) in self._ids or not tensor.value.requires_grad
                is_known = is_known or self._is_own(tensor.value)
            if not is_known and (tensor.value.is_floating_point() or tensor.value.is_complex()):
                raise RuntimeError(
                    f"{tensor.kind} {tensor.name!r} was added or unfrozen after the averager was "
                    "made, so it is not averaged: call refresh() on all ranks"
                )

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter of the model is no longer a part of its vector."""
        for parameters, attribute, tensor, address in self._places:
            value = parameters.get(attribute)
            if value is None or value.data_ptr() != address:
                raise RuntimeError(
                    f"{tensor.kind} {tensor.name!r} was replaced after the averager was made, so "
                    "it cannot be averaged: change it in place, or make the averager afterwards"
                )

    def check_members(self, param_groups: list[dict[str, Any]]) -> None:
        """Raise ValueError for a parameter in the groups that could be trained but not averaged."""
        for group in param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._ids or not parameter.requires_grad:
                    continue
                if not self._is_own(parameter):
                    self._refuse(param_groups, parameter)

    def _refuse(self, param_groups: list[dict[str, Any]], stranger: torch.Tensor) -> None:
        where = next(each for each in numbered(param_groups) if each[2] is stranger)
        frozen = any(each.value is stranger for each in self.tensors)
        reason = (
            "was frozen when the averager was made: call refresh() on all ranks"
            if frozen
            else "is in the optimizer but was not in the model when the averager was made"
        )
        raise ValueError(f"{place(*where)} is not averaged: it {reason}")

    def _is_own(self, parameter: torch.Tensor) -> bool:
        return any(each.value is parameter and each.role == OWN for each in self.tensors)

    def wait_for_device(self) -> None:
        """Wait until a device has done what is on its current stream, before reading a clock."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream(self.device).synchronize()

    # Copies

    @property
    def _all(self) -> list[torch.Tensor]:
        """The vectors that `save` copies; those of buffers are filled again instead."""
        held = [slots.held for slots in self._slots if self.overlaps]
        return [*self.memory[: len(self.dtypes)], *(halves for halves, _ in self._widened), *held]

    @torch.no_grad()
    def save(self) -> Saved:
        """Return a copy of every value that is averaged, and of all buffers, for `restore`."""
        buffers = [
            (module, attribute, tensor, tensor.detach().clone())
            for module in self.model.modules()
            for attribute, tensor in module._buffers.items()
            if tensor is not None
        ]
        return Saved([vector.clone() for vector in self._all], buffers)

    @torch.no_grad()
    def restore(self, saved: Saved) -> None:
        """Put the values that `save` returned back, bit for bit."""
        for vector, value in zip(self._all, saved.vectors, strict=True):
            vector.copy_(value)
        for module, attribute, tensor, value in saved.buffers:
            if tensor.is_inference():  # made by the module in that mode, and fixed outside of it
                tensor = value.clone()
            elif not is_expanded(tensor):
                tensor.detach().copy_(value)
            if module._buffers.get(attribute) is not tensor:
                setattr(module, attribute, tensor)
        for slots in self._slots if not self.overlaps else ():
            self._fill(slots)

    @property
    def stand_ins(self) -> list[torch.Tensor]:
        """The vectors that are averaged in place of half precision: part of a state."""
        return [wide for _, wide in self._widened]

    @torch.inference_mode(False)
    def release(self) -> None:
        """Give every averaged parameter memory of its own, with the same strides and values.

        Parameters that have been replaced are unchanged. Memory: in addition to the model, the
        vector of one dtype at a time.
        """
        self.vectors, self.memory, self._widened, self._slots, self._apart = [], [], [], [], []
        for dtype in self.dtypes:
            for _, _, tensor, address in self._places:
                value = tensor.value
                if real_dtype(value) is dtype and value.data_ptr() == address:
                    own = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
                    self.parts.pop(value, None)
                    value.data = own.copy_(value.detach())
            del self._memory[:1]
        self._places = []


def as_real(value: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs of real ones; other tensors as they are."""
    return torch.view_as_real(value) if value.is_complex() else value


def real_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor's real numbers."""
    return value.dtype.to_real() if value.is_complex() else value.dtype


def slot_dtype(value: torch.Tensor, wide: bool) -> torch.dtype:
    """Return the dtype in which a buffer is averaged."""
    dtype = real_dtype(value)
    return torch.float32 if wide and dtype in HALVES else dtype


def dense_gradient(tensor: Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient, None if it has none; raise TypeError if it is sparse."""
    gradient = tensor.value.grad
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    raise TypeError(
        f"{tensor.kind} {tensor.name!r} has a gradient that is {gradient.layout}: only dense ones "
        "can be averaged"
    )


def drop_nonfinite(parameters: Iterable[torch.Tensor]) -> None:
    """Set to None the gradients of these parameters that are not finite, and sparse ones."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and (
            gradient.layout is not torch.strided or not gradient.isfinite().all()
        ):
            parameter.grad = None
