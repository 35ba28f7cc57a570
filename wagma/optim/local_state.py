"""The local optimizer's state, such as momentum, as vectors that are averaged with the model.

Where ranks have different data, momentum that stays local pulls each rank's model towards its own
data again after every average. Averaging it costs a vector for each of the optimizer's tensors.

Source: our own. DES-LOC (arXiv 2505.22549) averages Adam's states less often than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from wagma.optim.extras import Extra
from wagma.optim.flat import FlatModel
from wagma.optim.optimizers import Optimizers, needs_closure, trial
from wagma.optim.tensors import DTYPES
from wagma.optim.vectors import new_vector, with_storage


class Kind(NamedTuple):
    """What an optimizer keeps under one name for a parameter.

    Attributes:
        dtype: of a tensor of the parameter's shape; None: a number.
        moves: whether a number is a tensor on the parameters' device.
    """

    dtype: torch.dtype | None
    moves: bool = False

    def __str__(self) -> str:
        if self.dtype is None:
            return "number on the device" if self.moves else "number"
        return str(self.dtype).removeprefix("torch.")


class StateLayout:
    """What optimizers keep for each parameter, also before their first step.

    Args:
        optimizers: any of torch's. Of one without a state a copy makes a step with small
            parameters.

    Raises:
        TypeError: a state is not averageable; the message names the optimizer and the state.
        ValueError: there is no optimizer, or one is made of others.
    """

    def __init__(self, optimizers: Optimizers):
        if not optimizers.given:
            raise ValueError("average_state needs the optimizers whose state it averages")
        parts = [type(each).__name__ for each in optimizers.reachable]
        if len(parts) > len(optimizers.given):
            raise ValueError(
                f"average_state: {optimizers} has optimizers of its own, with states of theirs "
                f"({', '.join(parts)}): where it only steps these, give them as a list in its place"
            )
        self._kinds: dict[int, dict[str, Kind]] = {}
        self._like: dict[tuple[torch.dtype, int], dict[str, Kind]] = {}
        for optimizer in optimizers.given:
            if needs_closure(optimizer):
                raise TypeError(
                    f"average_state: {type(optimizer).__name__} keeps its state for all parameters "
                    "together, not in tensors of their shapes"
                )
            for group in optimizer.param_groups:
                self.add(optimizer, group)

    def add(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Add a parameter group; raise TypeError if its state is not averageable."""
        tried: dict[tuple[torch.dtype, int], dict[str, Kind]] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            like = parameter.dtype, parameter.ndim
            if state:
                kinds = kinds_of(optimizer, parameter, state)
            elif like in tried:
                kinds = tried[like]
            else:
                kinds = tried[like] = try_step(optimizer, group, parameter)
            self._kinds[id(parameter)] = kinds
            self._like.setdefault(like, kinds)

    def of(self, parameter: torch.Tensor) -> dict[str, Kind]:
        """Return what is kept for a parameter, by name; of one in no group, what would be."""
        if id(parameter) in self._kinds:
            return self._kinds[id(parameter)]
        like = parameter.dtype, parameter.ndim
        same = (kinds for (dtype, _), kinds in self._like.items() if dtype is parameter.dtype)
        return self._like.get(like) or next(same, {})

    def __str__(self) -> str:
        names = {f"{name} ({kind})" for like in self._like.values() for name, kind in like.items()}
        return ", ".join(sorted(names)) or "none"


def try_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Kind]:
    """Return what an optimizer's step keeps for a parameter, by a step of a copy of it."""
    try:
        copy, small = trial(optimizer, group, parameter)
    except Exception as error:
        raise TypeError(
            f"average_state: what {type(optimizer).__name__} keeps for a parameter cannot be found "
            f"out, because a step of its copy raises {type(error).__name__}: {error}"
        ) from error
    if copy.state.keys() - {small}:
        raise TypeError(
            f"average_state: {type(optimizer).__name__} has state that belongs to no parameter"
        )
    return kinds_of(optimizer, small, copy.state.get(small, {}))


def kinds_of(
    optimizer: torch.optim.Optimizer | Optimizers, parameter: torch.Tensor, state: dict[str, Any]
) -> dict[str, Kind]:
    """Return the kinds of a parameter's state; raise TypeError if one cannot be averaged."""
    kinds = {}
    for name, value in state.items():
        if value is None or isinstance(value, (bool, str)):
            continue
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            if value.shape == parameter.shape and value.ndim and value.dtype in DTYPES:
                kinds[name] = Kind(value.dtype)
                continue
            if value.numel() == 1 and value.ndim == 0:
                moves = value.device.type != "cpu"
                kinds[name] = Kind(None, moves)
                continue
            what = f"{value.dtype} of shape {tuple(value.shape)}"
        elif isinstance(value, (int, float)):
            kinds[name] = Kind(None)
            continue
        raise TypeError(
            f"average_state: {name_of(optimizer)} keeps {name!r}, {what}, for a parameter of "
            f"shape {tuple(parameter.shape)}: only numbers and tensors of a parameter's shape can "
            "be averaged"
        )
    return kinds


def name_of(optimizer: torch.optim.Optimizer | Optimizers) -> str:
    """Return the name of an optimizer's class, or of those of several."""
    return str(optimizer) if isinstance(optimizer, Optimizers) else type(optimizer).__name__


class LocalState(Extra):
    """A local optimizer's state as vectors, of which its tensors become parts.

    Tensors of a parameter's shape are parts of a vector for each dtype; numbers, such as Adam's
    count of steps, are elements of a vector of float32, so that moments are averaged with what
    corrects their bias. Parts are zeros until the optimizer makes the state of their parameter. The
    vectors cover all of the model's parameters, also those that the optimizer does not have yet.

    Args:
        optimizers: the local ones.
        flat: the model.
        layout: what the optimizer keeps.
    """

    @torch.inference_mode(False)  # whatever the caller's mode, steps change them later
    def __init__(self, optimizers: Optimizers, flat: FlatModel, layout: StateLayout):
        self.optimizers, self.layout = optimizers, layout
        self._parts: dict[torch.Tensor, dict[str, torch.Tensor]] = {
            tensor.value: {} for tensor in flat.parameters
        }
        self.memory = []
        dtypes = {kind.dtype for _, _, kind in self._every_kind() if kind.dtype}
        for dtype in sorted(dtypes, key=str):
            places = [(p, name) for p, name, kind in self._every_kind() if kind.dtype is dtype]
            values = [parameter for parameter, _ in places]
            vector, parts = new_vector(values, dtype, flat.zeros)
            self.memory.append(vector)
            for (parameter, name), part in zip(places, parts, strict=True):
                self._parts[parameter][name] = part
        # Numbers on the host have a copy on the device of the model; on the CPU it is the same.
        self._host = self._numbers(torch.device("cpu"), flat.zeros, moves=False)
        on_device = self._numbers(flat.device, flat.zeros, moves=True)
        self._mirror = self._host.to(flat.device)
        self.memory += [each for each in (self._mirror, on_device) if each.numel()]
        self._others: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def _every_kind(self) -> Iterator[tuple[torch.Tensor, str, Kind]]:
        for parameter in self._parts:
            for name, kind in self.layout.of(parameter).items():
                yield parameter, name, kind

    def _numbers(
        self, device: torch.device, zeros: Callable[..., torch.Tensor], *, moves: bool
    ) -> torch.Tensor:
        """Return a vector of the numbers that are on the host, or on the device."""
        places = [
            (parameter, name)
            for parameter, name, kind in self._every_kind()
            if kind.dtype is None and kind.moves == moves
        ]
        vector = zeros(len(places), dtype=torch.float32, device=device)
        for k, (parameter, name) in enumerate(places):
            self._parts[parameter][name] = with_storage(vector[k : k + 1]).view(())
        return vector

    def after_step(self) -> None:
        """Make state that the optimizer has made or replaced a part of the vectors."""
        self._others = []
        for parameter, parts in self._parts.items():
            state = self.optimizers.state_of(parameter)
            if not state:
                continue
            for name, part in parts.items():
                if state.get(name) is not part:
                    self._adopt(state, name, part)
            if len(state) > len(parts):
                self._check_names(parameter, state, parts)
        self._push()

    def _adopt(self, state: dict[str, Any], name: str, part: torch.Tensor) -> None:
        value = state.get(name)
        if value is None:
            part.zero_()
            return
        if not isinstance(value, torch.Tensor):
            part.fill_(value)
        else:
            part.copy_(value.detach())
        if part.is_cpu and (not isinstance(value, torch.Tensor) or value.dtype is not part.dtype):
            self._others.append((state, name, part))
        else:
            state[name] = part

    def _check_names(
        self, parameter: torch.Tensor, state: dict[str, Any], parts: dict[str, torch.Tensor]
    ) -> None:
        kinds_of(self.optimizers, parameter, state)
        for name, value in state.items():
            averaged = isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool)
            if name not in parts and averaged:
                raise RuntimeError(
                    f"average_state: {self.optimizers} keeps {name!r}, which it did not when the "
                    "averager was made, so it is not averaged: call refresh() on all ranks"
                )

    @property
    def _is_mirrored(self) -> bool:
        return self._mirror is not self._host and self._host.numel() > 0

    def _push(self) -> None:
        if self._is_mirrored:
            self._mirror.copy_(self._host, non_blocking=True)

    def changed(self, on_host: list[Any] | None) -> None:
        """Give the optimizer the numbers that were averaged; tensors have changed in place."""
        if self._is_mirrored:
            index = next(k for k, each in enumerate(self.memory) if each is self._mirror)
            values = self._mirror if on_host is None else torch.from_numpy(on_host[index])
            self._host.copy_(values)
        for state, name, part in self._others:
            value = state[name]
            if isinstance(value, torch.Tensor):
                whole = not value.is_floating_point()
                value.copy_(part.round() if whole else part)
            else:
                state[name] = type(value)(round(float(part)) if type(value) is int else part)

    def loaded(self, state: dict[str, Any] | None) -> None:
        """Take over the state that the optimizer has loaded."""
        for parameter, parts in self._parts.items():
            if not self.optimizers.state_of(parameter):
                for part in parts.values():
                    part.zero_()
        self.after_step()

    @torch.inference_mode(False)
    def release(self) -> None:
        """Give the optimizer's state memory of its own."""
        for parameter, parts in self._parts.items():
            state = self.optimizers.state_of(parameter) or {}
            for name, part in parts.items():
                if state.get(name) is part:
                    state[name] = torch.empty_like(part).copy_(part)
        self._parts, self._others, self.memory = {}, [], []
