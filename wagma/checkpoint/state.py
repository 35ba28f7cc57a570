"""What a checkpoint holds: copies of the model, and of everything that is a rank's own."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from wagma.checkpoint.files import CheckpointError
from wagma.optim.flat import FlatModel
from wagma.optim.tensors import AVERAGED, OWN, Tensor


class Unchanging:
    """Values of which a checkpoint needs no copy, since nothing changes them.

    Args:
        value: tensors on the CPU, or containers of them.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def copied(value: Any) -> Any:
    """Return a value with copies of its tensors on the CPU, and plain dicts, lists and tuples.

    A Counter stays one, as a MultiStepLR within a SequentialLR needs its milestones.
    """
    if isinstance(value, Unchanging):
        return value.value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        plain = {key: copied(each) for key, each in value.items()}
        return Counter(plain) if type(value) is Counter else plain
    if isinstance(value, (list, tuple)):
        each = map(copied, value)
        return type(value)(each) if type(value) in (list, tuple) else [*each]
    return value


def without_tensors(value: Any) -> Any:
    """Return the same value without its tensors, which is small; those of other classes stay."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return None
    if isinstance(value, dict):
        return {key: without_tensors(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_tensors(each) for each in value]
    return value


def check_readable(values: Mapping[str, Any]) -> None:
    """Raise TypeError if one could not be read back without executing code; it names that."""
    for name, value in values.items():
        file = io.BytesIO()
        try:
            torch.save(without_tensors(value), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{name!r} is or holds what a checkpoint cannot: it takes tensors, numbers, "
                f"texts, None, and dicts, lists and tuples of these ({first_line(error)})"
            ) from error


def first_line(error: Exception) -> str:
    """Return the first line of what an exception says, or its type if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def model_of(flat: FlatModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of the model's tensors by name, and of further names those of the same tensor.

    The copies are contiguous, as safetensors needs them.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in flat.model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in first:
            tied[name] = first[id(value)]
            continue
        first[id(value)] = name
        value = value.detach()
        tensors[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    return tensors, tied


def shared(flat: FlatModel) -> list[Tensor]:
    """Return what all ranks have alike, as it is now: averaged, or a parameter that is frozen."""
    alike = [each for each in flat.tensors if each.role == AVERAGED or each.is_parameter]
    # A buffer may have been replaced.
    now = [each._replace(value=getattr(*each.homes[0], each.value)) for each in alike]
    return [each for each in now if each.role != OWN]


def own_of(flat: FlatModel) -> dict[str, Any]:
    """Return what of the model's state is each rank's own: buffers not averaged, extra state, …"""
    alike = {id(tensor.value) for tensor in shared(flat)}
    state = flat.model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if id(value) not in alike}


def check_model(flat: FlatModel, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise CheckpointError unless a file's tensors are those of the model."""
    own = flat.model.state_dict(keep_vars=True)
    expected = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    for name in {**expected, **tensors}:
        here, there = (described(each.get(name)) for each in (expected, tensors))
        if here != there:
            raise CheckpointError(f"{where} has {there} as {name!r}, the model {here}")


def described(value: torch.Tensor | None) -> str:
    """Return a tensor's dtype and shape in words."""
    if value is None:
        return "nothing"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
