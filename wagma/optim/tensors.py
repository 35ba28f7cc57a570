"""A model's tensors: which are averaged, which start equal, and which are each rank's own.

`survey` lists them and refuses those that cannot be averaged, `agree` makes every rank refuse them
alike, and `broadcast` copies rank 0's values to every rank.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collectives.agreement import agreed, raise_collectively
from wagma.optim.vectors import dense_stride

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
DISTRIBUTED = {"DistributedDataParallel", "FullyShardedDataParallel"}  # of torch

# A tensor's role: averaged; equal on all ranks at first, and then left alone; or each rank's own.
AVERAGED, EQUAL, OWN = "", "not averaged", "each rank's own"

# Which tensors: their names, patterns of them, names of modules, or a function of name and tensor.
Selection = str | Sequence[str] | Callable[[str, torch.Tensor], bool]


class Tensor(NamedTuple):
    """A parameter or persistent buffer, and the places in the model where it is registered."""

    kind: str
    name: str
    value: torch.Tensor
    homes: list[tuple[torch.nn.Module, str]]  # (module, attribute); several when it is tied
    role: str = AVERAGED

    @property
    def is_parameter(self) -> bool:
        return self.kind != "buffer"

    def __str__(self) -> str:
        if self.role == OWN:
            return f"{self.kind} {self.name!r}, {OWN}"
        role = f", {self.role}" if self.role else ""
        stride = dense_stride(self.value) if is_plain(self.value) else None
        usual = torch.empty(self.value.shape, device="meta").stride() if stride else None
        layout = "" if stride == usual else f", strides {stride}"
        dtype = str(self.value.dtype).removeprefix("torch.")
        return f"{self.kind} {self.name!r}, {dtype} {tuple(self.value.shape)}{layout}{role}"


def survey(
    model: torch.nn.Module,
    param_groups: list[dict[str, Any]],
    exclude: Selection = (),
    include: Selection = (),
) -> list[Tensor]:
    """List the model's parameters and persistent buffers, tied ones once, in its modules' order.

    Averaged are the trainable parameters, the frozen ones to `include`, and buffers of floating
    point that are finite, except those to `exclude`.

    Args:
        model: `torch.nn.Module`; what is averaged is dense, of float16, bfloat16, float32, float64
            or complex, and all on the CPU, or all on one CUDA device.
        param_groups: of the optimizers of some or all of the model's parameters.
        exclude, include: see `Selection`.

    Raises:
        TypeError: not a module; one that averages by itself (DDP, FSDP); a tensor to average that
            is of another dtype, layout or device, of a class like DTensor, or made in inference
            mode; tensors on several devices.
        ValueError: names that the model does not have, a lazy parameter without a shape, a
            parameter of an optimizer that is not the model's, elements that share memory without
            being of the same object, or a model with nothing to train.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    check_not_distributed(model)
    found = list(named_tensors(model))
    excluded, included = selected(found, "exclude", exclude), selected(found, "include", include)
    tensors = [
        tensor._replace(role=role_of(tensor, tensor.name in excluded, tensor.name in included))
        for tensor in found
    ]
    averaged = [tensor for tensor in tensors if tensor.role == AVERAGED]
    for tensor in averaged:
        check_averageable(tensor)
    if not any(tensor.is_parameter and tensor.value.numel() for tensor in averaged):
        raise ValueError("the model has no floating-point parameters to average")
    check_one_device(averaged)
    moved = {id(tensor.value) for tensor in averaged if tensor.is_parameter}
    here = [t for t in named_tensors(model, transient=True) if is_plain(t.value)]
    check_no_aliases([t for t in here if t.value.device == averaged[0].value.device], moved)
    check_members(tensors, param_groups)
    return tensors


def named_tensors(model: torch.nn.Module, *, transient: bool = False) -> Iterable[Tensor]:
    """Yield every parameter and persistent buffer once, with all its homes; or all buffers."""
    found: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        left_out = () if transient else module._non_persistent_buffers_set
        named = [("parameter", *item) for item in module.named_parameters(recurse=False)]
        named += [("buffer", *item) for item in module.named_buffers(recurse=False)]
        for kind, attribute, value in named:
            if kind == "buffer" and attribute in left_out:
                continue
            if kind == "parameter" and not value.requires_grad:
                kind = "frozen parameter"
            name = f"{prefix}.{attribute}" if prefix else attribute
            tensor = found.setdefault(id(value), Tensor(kind, name, value, []))
            tensor.homes.append((module, attribute))
    return found.values()


def selected(tensors: list[Tensor], argument: str, selection: Selection) -> set[str]:
    """Return the names that an argument selects; raise if it is of no use or selects nothing."""
    if callable(selection):
        return {each.name for each in tensors if selection(each.name, each.value)}
    patterns = [selection] if isinstance(selection, str) else list(selection)
    names = [each.name for each in tensors]
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} has {pattern!r}, which is not a name or pattern")
        inside = f"{pattern}.*"
        matches = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, inside)}
        if not matches:
            near = difflib.get_close_matches(pattern, names, cutoff=0.5)
            hint = f"; near ones are {', '.join(map(repr, near))}" if near else ""
            raise ValueError(
                f"{argument}: the model has no parameter or persistent buffer {pattern!r}{hint}"
            )
        chosen |= matches
    return chosen


def role_of(tensor: Tensor, excluded: bool, included: bool) -> str:
    """Return a tensor's role; raise ValueError if a frozen parameter cannot be included."""
    value = tensor.value
    if excluded:
        return OWN
    if tensor.kind == "parameter":
        return AVERAGED
    if tensor.kind == "buffer":
        if not (value.is_floating_point() or value.is_complex()):
            return EQUAL
        plain = is_plain(value) and value.dtype in DTYPES + COMPLEX
        plain = plain and value.device.type in averageable_devices()
        return EQUAL if plain and not bool(value.isfinite().all()) else AVERAGED
    if included and not bool(value.isfinite().all()):
        raise ValueError(f"include: frozen parameter {tensor.name!r} is not finite")
    return AVERAGED if included else EQUAL


def is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor is dense, of no class with an inner structure, and has a shape."""
    return (
        not torch.nn.parameter.is_lazy(value)
        and not hasattr(type(value), "__tensor_flatten__")
        and value.layout is torch.strided
    )


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
    way_out = f"; exclude=[{tensor.name!r}] leaves it each rank's own"
    if hasattr(type(value), "__tensor_flatten__"):
        kind = type(value).__name__
        raise TypeError(f"{name} is a {kind}: only plain tensors can be averaged{way_out}")
    if value.is_inference():
        raise TypeError(f"{name} was made in torch.inference_mode(), so it cannot be trained")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} is {value.layout}: only dense tensors can be averaged{way_out}")
    if value.device.type not in averageable_devices():
        raise TypeError(f"{name} is on {value.device}, neither on the CPU nor on a CUDA device")
    if value.dtype not in DTYPES + COMPLEX:
        averageable = ", ".join(str(each).removeprefix("torch.") for each in DTYPES + COMPLEX)
        raise TypeError(f"{name} is {value.dtype}, not one of {averageable}{way_out}")
    if value.dtype is torch.bfloat16 and importlib.util.find_spec("ml_dtypes") is None:
        raise TypeError(f"{name} is torch.bfloat16, which needs `pip install ml_dtypes`")
    if is_expanded(value):
        raise ValueError(
            f"{name} is expanded, so its elements share memory: register a clone() of it"
        )


def is_expanded(value: torch.Tensor) -> bool:
    """Return whether elements share memory."""
    return any(size > 1 and not stride for size, stride in zip(value.shape, value.stride()))


def averageable_devices() -> set[str]:
    """Return the kinds of devices whose memory a collective can average.

    A backend that is not part of torch may use memory that the CUDA driver knows; if it does not,
    the collective's constructor raises.
    """
    return {"cpu", "cuda", torch._C._get_privateuse1_backend_name()}


def check_one_device(tensors: list[Tensor]) -> None:
    """Raise TypeError for tensors on several devices."""
    first, *others = tensors
    for other in others:
        if other.value.device != first.value.device:
            raise TypeError(
                f"{first.kind} {first.name!r} is on {first.value.device}, {other.kind} "
                f"{other.name!r} on {other.value.device}: a model is averaged on one device"
            )


def check_no_aliases(tensors: list[Tensor], moved: set[int]) -> None:
    """Raise for distinct tensors that share memory, if one moves: its `id` is in `moved`."""
    ends: list[tuple[int, Tensor]] = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.value.data_ptr()):
        start = tensor.value.data_ptr()
        if not tensor.value.numel():
            continue
        ends = [(end, other) for end, other in ends if end > start]
        for _, other in ends:
            one, two = other.value, tensor.value
            if moved & {id(one), id(two)} and share_elements(one, two):
                raise ValueError(
                    f"{other.kind} {other.name!r} and {tensor.kind} {tensor.name!r} share memory "
                    "but are different objects: register one object twice to tie them"
                )
        ends.append((start + extent(tensor.value), tensor))


def share_elements(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether tensors, whose address ranges overlap, have a byte in common."""
    base = min(one.data_ptr(), two.data_ptr())
    end = max(value.data_ptr() + extent(value) for value in (one, two))
    taken = torch.zeros(end - base, dtype=torch.bool, device="cpu")
    bytes_of = [
        taken.as_strided(
            (*value.shape, value.itemsize),
            (*(stride * value.itemsize for stride in value.stride()), 1),
            value.data_ptr() - base,
        )
        for value in (one, two)
    ]
    bytes_of[0].fill_(True)
    return bool(bytes_of[1].any())


def extent(value: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last in memory."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (last + 1) * value.itemsize


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
        Exception: what `find` raises, or ValueError for a difference, the same on every rank; it
            names the ranks.
    """
    found = agreed(comm, find)
    mine, error = [str(item) for item in found], None
    reference = comm.bcast(mine, root=0)
    if mine != reference:
        pairs = zip_longest(mine, reference, fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        error = ValueError(f"the model has {here} where rank 0 has {there}")
    raise_collectively(comm, error)
    return found


def broadcast(comm: MPI.Intracomm, tensors: list[Tensor]) -> None:
    """Copy rank 0's values to every rank, except of what is each rank's own; collective.

    Those of special classes or layouts, such as quantized weights, and expanded ones are left
    alone.
    """
    error: Exception | None = None
    for tensor in tensors:
        value = tensor.value.detach()
        if tensor.role == OWN or not is_plain(value) or is_expanded(value):
            continue
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
