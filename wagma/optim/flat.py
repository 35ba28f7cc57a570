"""A model as one vector per dtype, which all methods of this package average.

The steps, in this order: `survey` lists a model's tensors and refuses those that cannot be
averaged, `agree` makes every rank refuse them alike, `broadcast` copies rank 0's values to every
rank, and `FlatModel` moves the tensors into contiguous vectors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from collectives.agreement import raise_collectively
from collectives.memory import device_caches
from wagma.optim.vectors import DeviceVector, dense_stride, for_collective, new_vector

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

DISTRIBUTED = {"DistributedDataParallel", "FullyShardedDataParallel"}  # of torch


class Tensor(NamedTuple):
    """A parameter or buffer, and the places in the model where it is registered."""

    kind: str
    name: str
    value: torch.Tensor
    homes: list[tuple[torch.nn.Module, str]]  # (module, attribute); several when it is tied

    def __str__(self) -> str:
        stride = dense_stride(self.value)
        layout = "" if stride == contiguous_stride(self.value) else f", strides {stride}"
        dtype = str(self.value.dtype).removeprefix("torch.")
        return f"{self.kind} {self.name!r}, {dtype} {tuple(self.value.shape)}{layout}"


class Constant(NamedTuple):
    """A tensor that is not averaged, which a module may replace, where it was, and its value."""

    module: torch.nn.Module
    attribute: str
    tensor: torch.Tensor
    value: torch.Tensor


def survey(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the model's tensors, tied ones once, in the order of its modules.

    Args:
        model: `torch.nn.Module`, its parameters and buffers dense, the floating-point ones
            float16, bfloat16, float32 or float64 and all on the CPU, or all on one CUDA device.
        optimizer: `torch.optim.Optimizer` of some or all of the model's parameters.

    Returns:
        A list of `Tensor`.

    Raises:
        TypeError: not a module or an optimizer; a module that averages by itself (DDP, FSDP); a
            tensor of another dtype, layout or device, of a class like DTensor, or made in
            inference mode; floating-point tensors on several devices.
        ValueError: a lazy parameter without a shape, a parameter of the optimizer that is not
            the model's, elements that share memory without being of the same object, or a model
            without any floating-point parameter.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    check_not_distributed(model)
    tensors = list(named_tensors(model))
    for tensor in tensors:
        check_averageable(tensor)
    check_any_parameter(tensors)
    check_one_device(tensors)
    check_no_aliases(tensors)
    check_members(tensors, optimizer.param_groups)
    return tensors


def named_tensors(model: torch.nn.Module) -> Iterable[Tensor]:
    """Yield every parameter and buffer once, with all its homes."""
    found: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        named = [("parameter", *item) for item in module.named_parameters(recurse=False)]
        named += [("buffer", *item) for item in module.named_buffers(recurse=False)]
        for kind, attribute, value in named:
            if kind == "parameter" and not value.requires_grad:
                kind = "frozen parameter"
            name = f"{prefix}.{attribute}" if prefix else attribute
            tensor = found.setdefault(id(value), Tensor(kind, name, value, []))
            tensor.homes.append((module, attribute))
    return found.values()


def every_value(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the values of `named_tensors`, tied ones repeatedly: ten times as fast, unnamed."""
    for module in model.modules():
        for values in (module._parameters.values(), module._buffers.values()):
            yield from (value for value in values if value is not None)


def check_not_distributed(model: torch.nn.Module) -> None:
    """Raise for a module that distributes or averages its parameters or gradients itself."""
    for prefix, module in model.named_modules():
        for kind in type(module).__mro__:  # by name: importing FSDP takes a second
            if kind.__name__ in DISTRIBUTED and kind.__module__.startswith("torch."):
                what = f"module {prefix!r}" if prefix else "the model"
                raise TypeError(
                    f"{what} is a {kind.__name__}, which averages by itself: pass the module that "
                    "it wraps"
                )


def check_averageable(tensor: Tensor) -> None:
    """Raise for a tensor that cannot become a part of a vector."""
    value, name = tensor.value, f"{tensor.kind} {tensor.name!r}"
    if torch.nn.parameter.is_lazy(value):
        raise ValueError(f"{name} has no shape yet: run a batch through the model first")
    if hasattr(type(value), "__tensor_flatten__"):
        raise TypeError(f"{name} is a {type(value).__name__}: only plain tensors can be averaged")
    if value.is_inference():
        raise TypeError(f"{name} was made in torch.inference_mode(), so it cannot be trained")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} is {value.layout}: only dense tensors can be averaged")
    if value.device.type not in averageable_devices():
        raise TypeError(f"{name} is on {value.device}, neither on the CPU nor on a CUDA device")
    if value.is_complex() or (value.is_floating_point() and value.dtype not in DTYPES):
        averageable = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name} is {value.dtype}, not one of {averageable}")
    if value.dtype is torch.bfloat16 and importlib.util.find_spec("ml_dtypes") is None:
        raise TypeError(f"{name} is torch.bfloat16, which needs `pip install ml_dtypes`")
    if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride())):
        raise ValueError(
            f"{name} is expanded, so its elements share memory: register a clone() of it"
        )


def averageable_devices() -> set[str]:
    """Return the kinds of devices whose memory a collective can average.

    A backend that is not part of torch may use memory that the CUDA driver knows; if it does not,
    the collective's constructor raises.
    """
    return {"cpu", "cuda", torch._C._get_privateuse1_backend_name()}


def check_one_device(tensors: list[Tensor]) -> None:
    """Raise TypeError for floating-point tensors on several devices."""
    first, *others = [tensor for tensor in tensors if tensor.value.is_floating_point()]
    for other in others:
        if other.value.device != first.value.device:
            raise TypeError(
                f"{first.kind} {first.name!r} is on {first.value.device}, {other.kind} "
                f"{other.name!r} on {other.value.device}: a model is averaged on one device"
            )


def check_any_parameter(tensors: list[Tensor]) -> None:
    """Raise unless there is a floating-point parameter with elements."""
    if not any(
        "parameter" in tensor.kind and tensor.value.is_floating_point() and tensor.value.numel()
        for tensor in tensors
    ):
        raise ValueError("the model has no floating-point parameters")


def check_no_aliases(tensors: list[Tensor]) -> None:
    """Raise for distinct tensors that share memory, which parts of the vector do not."""
    cluster: list[Tensor] = []
    end = 0  # a cluster: tensors whose address ranges overlap; they may still interleave
    for tensor in sorted(tensors, key=lambda tensor: tensor.value.data_ptr()):
        if not tensor.value.numel():
            continue
        start = tensor.value.data_ptr()
        cluster = [*cluster, tensor] if start < end else [tensor]
        end = max(end, start + extent(tensor.value))
        other = sharer(cluster) if len(cluster) > 1 else None
        if other:
            raise ValueError(
                f"{other.kind} {other.name!r} and {tensor.kind} {tensor.name!r} share memory but "
                "are different objects: register one object twice to tie them"
            )


def extent(value: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last in memory."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (last + 1) * value.itemsize


def sharer(cluster: list[Tensor]) -> Tensor | None:
    """Return the first tensor that has a byte in common with the last one, or None."""
    base = min(tensor.value.data_ptr() for tensor in cluster)
    length = max(tensor.value.data_ptr() - base + extent(tensor.value) for tensor in cluster)
    taken = torch.zeros(length, dtype=torch.bool, device="cpu")

    def bytes_of(value: torch.Tensor) -> torch.Tensor:
        size = value.itemsize
        stride = [stride * size for stride in value.stride()]
        return taken.as_strided((*value.shape, size), (*stride, 1), value.data_ptr() - base)

    *others, last = cluster
    bytes_of(last.value).fill_(True)
    return next((other for other in others if bytes_of(other.value).any()), None)


def check_members(tensors: list[Tensor], param_groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for a parameter in the groups that is not among the tensors."""
    members = {id(tensor.value) for tensor in tensors}
    for number, index, parameter in numbered(param_groups):
        if id(parameter) not in members:
            raise ValueError(
                f"{place(number, index, parameter)} is in the optimizer but not in the model, "
                "so it would not be averaged"
            )


def ids_of(param_groups: list[dict[str, Any]]) -> set[int]:
    """Return `id` of every parameter of the groups."""
    return {id(parameter) for group in param_groups for parameter in group["params"]}


def numbered(param_groups: list[dict[str, Any]]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield each parameter of the groups after its group's number and its index there."""
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            yield number, index, parameter


def place(number: int, index: int, parameter: torch.Tensor) -> str:
    """Return where a parameter is in an optimizer, and its shape, for a message."""
    lazy = torch.nn.parameter.is_lazy(parameter)
    shape = "without a shape" if lazy else f"shape {tuple(parameter.shape)}"
    return f"parameter {index} of group {number}, {shape},"


def agree(comm: MPI.Intracomm, find: Callable[[], list[Any]]) -> list[Any]:
    """Return `find()` if it succeeds and prints the same on every rank; else raise everywhere.

    Args:
        comm: mpi4py communicator; collective.
        find: function without arguments that returns a list, such as a survey; the `str` of its
            elements must not differ between ranks. It may raise.

    Raises:
        TypeError, ValueError: the same on every rank; it names the ranks that raised or that differ
            from rank 0, and the difference.
        RuntimeError: for other errors of `find`, the same on every rank.
    """
    found: list[Any] = []
    error: Exception | None = None
    try:
        found = find()
    except (TypeError, ValueError) as problem:
        error = problem
    except Exception as problem:  # the other ranks wait for the outcome, whatever it is
        error = RuntimeError(f"{type(problem).__name__}: {problem}")
    mine = [str(item) for item in found]
    reference = comm.bcast(None if error else mine, root=0)
    if error is None and reference is not None and mine != reference:
        error = ValueError(difference(reference, mine))
    raise_collectively(comm, error)
    return found


def difference(reference: list[str], mine: list[str]) -> str:
    """Return the first difference between two ranks' lists, as an error message."""
    pairs = zip_longest(mine, reference, fillvalue="nothing")
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    return f"the model has {here} where rank 0 has {there}"


def broadcast(comm: MPI.Intracomm, tensors: list[Tensor]) -> None:
    """Copy rank 0's value of every tensor, including integers, to every rank (collective)."""
    error: Exception | None = None
    for tensor in tensors:
        value = tensor.value.detach()
        try:
            dense = value.contiguous().cpu()
        except Exception as problem:  # of the device; the others wait in the broadcast
            error, dense = error or problem, torch.empty(value.shape, dtype=value.dtype)
        comm.Bcast(dense.view(-1).view(torch.uint8).numpy(), root=0)
        try:
            value.copy_(dense)
        except Exception as problem:
            error = error or problem
    raise_collectively(comm, error)


class FlatModel:
    """A model whose averaged tensors are parts of one contiguous vector for each dtype.

    All floating-point parameters are averaged, including frozen ones (so that they can join the
    optimizer later), and all floating-point buffers, such as BatchNorm's running statistics.
    Integer tensors are not, nor are buffers and frozen parameters with a non-finite value: an
    attention mask of -inf is a constant, and would make every average non-finite.

    Each tensor has a storage of its own, which is its part of the vector, so that saving or copying
    some of them does not include the others. `release` gives them memory of their own.

    Attributes:
        model: the `torch.nn.Module`.
        averaged, constant: lists of the tensors that are averaged and of those that are not.
        device: the `torch.device` that the averaged tensors are on; the others stay where they are.
        vectors: list of 1-D arrays for collectives, one for each dtype of the averaged tensors
            (float16, bfloat16, float32, float64), that share the tensors' memory: numpy arrays,
            with bfloat16 from ml_dtypes, or `DeviceVector`s on a CUDA device. Each tensor starts at
            a multiple of 64 bytes; the gaps hold zeros. Empty after `release`.
        memory: list of the same vectors as 1-D tensors.
        dtypes: list of the vectors' `torch.dtype`s.
        zeros: function that makes vectors that are averaged, as `torch.zeros` does.
    """

    @torch.inference_mode(False)  # whatever the caller's mode, the views must be trainable
    def __init__(
        self,
        model: torch.nn.Module,
        tensors: list[Tensor],
        zeros: Callable[..., torch.Tensor] = torch.zeros,
    ):
        """Move the tensors, the model's survey after its broadcast, into new buffers.

        Those are what `zeros` returns, as are other vectors that are averaged with them. Shapes,
        strides and values stay, and so do the `torch.nn.Parameter` objects.
        """
        self.model = model
        self.averaged = [tensor for tensor in tensors if is_averaged(tensor)]
        self.constant = [tensor for tensor in tensors if not is_averaged(tensor)]
        if not any(tensor.value.numel() for tensor in self.averaged):
            raise ValueError("nothing to average: all of the model is frozen and not finite")
        self.dtypes = list(dict.fromkeys(tensor.value.dtype for tensor in self.averaged))
        self.device = self.averaged[0].value.device
        self.zeros = zeros
        self.memory = [flatten([t.value for t in self.of(dtype)], zeros) for dtype in self.dtypes]
        self.vectors: list[np.ndarray | DeviceVector] = list(map(for_collective, self.memory))
        if self.device.type != "cpu":
            # The tensors' former memory, as much as the model has, for the collective's vectors.
            device_caches.empty()
        self._ids = {id(tensor.value) for tensor in self.averaged}
        self._known = self._ids.union(id(tensor.value) for tensor in self.constant)
        self._places = [
            (module, attribute, tensor, tensor.value.data_ptr())
            for tensor in self.averaged
            for module, attribute in tensor.homes
        ]

    @property
    def parameters(self) -> list[Tensor]:
        """The averaged tensors that are parameters, frozen or not."""
        return [tensor for tensor in self.averaged if "parameter" in tensor.kind]

    def of(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the averaged tensors of a dtype, in their order in its vector."""
        return [tensor for tensor in self.averaged if tensor.value.dtype is dtype]

    def check(self) -> None:
        """Raise RuntimeError if the model has something to average that is not in the vectors."""
        self.check_places()
        if not self.vectors or self._knows(every_value(self.model)):
            return
        for tensor in named_tensors(self.model):
            if not self._knows([tensor.value]) and is_new_part(tensor):
                raise RuntimeError(
                    f"{tensor.kind} {tensor.name!r} was added after the model was wrapped, so it "
                    "is not averaged: close the optimizer, and wrap the model again"
                )

    def _knows(self, values: Iterable[torch.Tensor]) -> bool:
        return self._known.issuperset(map(id, values))

    def check_places(self) -> None:
        """Raise RuntimeError if a tensor of the model is no longer a part of its vector."""
        for module, attribute, tensor, address in self._places:
            value = getattr(module, attribute, None)
            if not isinstance(value, torch.Tensor) or value.data_ptr() != address:
                raise RuntimeError(
                    f"{tensor.kind} {tensor.name!r} was replaced after the model was wrapped, "
                    "so it cannot be averaged: change it in place, or wrap the model afterwards"
                )

    def check_members(self, param_groups: list[dict[str, Any]]) -> None:
        """Raise ValueError for a parameter in the groups that could be trained but not averaged."""
        for number, index, parameter in numbered(param_groups):
            if id(parameter) in self._ids or not parameter.requires_grad:
                continue
            reason = "is in the optimizer but was not in the model"
            if any(tensor.value is parameter for tensor in self.constant):
                reason = "was frozen and not finite"
            raise ValueError(
                f"{place(number, index, parameter)} {reason} when the model was wrapped, so it "
                "would not be averaged"
            )

    def wait_for_device(self) -> None:
        """Wait until a device has done what is on its current stream, before reading a clock."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream(self.device).synchronize()

    def mark_changed(self) -> None:
        """Make autograd refuse a graph built with the parameters before they changed."""
        for tensor in self.averaged:
            if tensor.value.requires_grad:
                torch.autograd.graph.increment_version(tensor.value)

    def save(self) -> tuple[list[torch.Tensor], list[Constant]]:
        """Return a copy of every tensor's value, averaged or not, for `restore`."""
        homes = [home for tensor in self.constant for home in tensor.homes]
        found = [(*home, getattr(*home, None)) for home in homes]
        constants = [
            Constant(module, attribute, tensor, tensor.detach().clone())
            for module, attribute, tensor in found
            if isinstance(tensor, torch.Tensor)
        ]
        return [vector.clone() for vector in self.memory], constants

    def restore(self, saved: tuple[list[torch.Tensor], list[Constant]]) -> None:
        """Put the values that `save` returned back, bit for bit."""
        vectors, constants = saved
        for vector, value in zip(self.memory, vectors, strict=True):
            vector.copy_(value)
        for module, attribute, tensor, value in constants:
            if tensor.is_inference():  # made by the module in that mode, and fixed outside of it
                tensor = value.clone()
            else:
                tensor.detach().copy_(value)
            if getattr(module, attribute, None) is not tensor:
                setattr(module, attribute, tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's `state_dict()` of clones; tied tensors share one."""
        state, clones = self.model.state_dict(), {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):  # else it is a module's extra state
                memory = value.data_ptr(), value.dtype, value.shape, value.stride()
                if memory not in clones:
                    clones[memory] = value.clone()
                state[name] = clones[memory]
        return state

    @torch.inference_mode(False)
    def release(self) -> None:
        """Give every averaged tensor memory of its own, with the same strides and values.

        Tensors that have been replaced are unchanged. Memory: in addition to the model, the vector
        of one dtype at a time.
        """
        for dtype in self.dtypes:
            for _, _, tensor, address in self._places:
                value = tensor.value
                if value.dtype is dtype and value.data_ptr() == address:
                    own = torch.empty_strided(
                        value.shape, value.stride(), dtype=dtype, device=value.device
                    )
                    value.data = own.copy_(value.detach())
            del self.vectors[:1], self.memory[:1]
        self._places = []


def flatten(values: list[torch.Tensor], zeros: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Make the tensors, all of one dtype, parts of a new vector, and return that."""
    vector, parts = new_vector(values, zeros=zeros)
    for value, part in zip(values, parts, strict=True):
        part.copy_(value.detach())
        value.data = part
    return vector


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


def is_averaged(tensor: Tensor) -> bool:
    """Return whether a tensor is averaged: see `FlatModel`."""
    value = tensor.value.detach()
    return value.is_floating_point() and (
        tensor.kind == "parameter" or bool(value.isfinite().all())
    )


def is_new_part(tensor: Tensor) -> bool:
    """Return whether a tensor that is new to the model must be averaged: see `check`."""
    module, attribute = tensor.homes[0]
    if tensor.kind == "buffer":
        persistent = attribute not in module._non_persistent_buffers_set
        return persistent and tensor.value.is_floating_point()
    return tensor.value.requires_grad


def contiguous_stride(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a contiguous copy."""
    return torch.empty(value.shape, device="meta").stride()
