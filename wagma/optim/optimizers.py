"""The user's optimizers, where averages concern their states."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from wagma.optim.tensors import Tensor

State = dict[torch.optim.Optimizer, dict[Any, Any]]

# Classes of other libraries that stand for an optimizer, and where they have it.
WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "_optimizer"}
SMALL = 1 << 14  # elements of a gradient that is copied to be checked with others
# Sizes of the parameters that an optimizer is tried with: none is like another.
SIZES = (2, 3, 5, 7, 11, 13, 17, 19)
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
CHECKED = (1, 6)  # steps after which copies of the weights in states are looked for
TAME = 1e30  # for a sum of squares: none of them overflows float32


class Optimizers:
    """The optimizers that an averager was given, and those that these are made of.

    Args:
        given: one, a list of them, or None.

    Attributes:
        given: tuple of those whose steps are the training's.
        reachable: list of all, also those in attributes of these, such as the parts of a composite.

    Raises:
        TypeError: one is not a `torch.optim.Optimizer`.
    """

    def __init__(self, given: Any):
        listed = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
        self.given = tuple(dict.fromkeys(map(unwrapped, listed)))
        self.reachable = list(reachable(self.given))
        self._copies: State | None = None
        self._hidden: set[str] = set()
        self._packed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._large: list[torch.Tensor] = []
        self._packs: list[torch.Tensor] = []
        self._members = -1

    def check(self, gradients: bool, method: str) -> None:
        """Raise TypeError for an optimizer that cannot be beside a method.

        Args:
            gradients: whether it averages gradients, else models.
            method: its name.
        """
        for each in self.reachable:
            name = type(each).__name__
            if isinstance(each, torch.optim.LBFGS):
                raise TypeError(
                    f"{name} learns the curvature from differences of models and gradients, which "
                    f"{method} would change between its steps: train with it alone"
                )
            if gradients and needs_closure(each):
                raise TypeError(
                    f"{name} evaluates a closure several times in a step, and {method} could not "
                    "average the gradients of each evaluation"
                )

    def check_steps(self, parameters: list[Tensor]) -> None:
        """Raise RuntimeError for an optimizer whose steps undo averages.

        It keeps weights in its state, such as float32 masters, and sets the model to them. The
        parameters are as its last step has left them.
        """
        before, self._hidden = self._hidden, set()
        for optimizer, name, tensor in copies_of_parameters(self, parameters):
            hidden = name in vars(optimizer)  # not in its state, so that no copy can be tried
            if hidden:
                self._hidden.add(name)
            if name in before or (not hidden and goes_back(optimizer, tensor.value)):
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps the weights of {tensor.kind} "
                    f"{tensor.name!r} as {name!r}, and sets the model to them in each step, which "
                    "undoes averages: average_state=True averages its `state` as well"
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of those given."""
        return [group for optimizer in self.given for group in optimizer.param_groups]

    def __str__(self) -> str:
        return "+".join(type(each).__name__ for each in self.given) or "no optimizer"

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return what the optimizer of a parameter keeps for it; None: nothing."""
        for optimizer in self.given:
            state = optimizer.state.get(parameter)
            if state:
                return state
        return None

    # States that an update which is left out has spoilt

    def begin_step(self) -> None:
        """Forget the copies of states that are finite again."""
        if self._copies is not None and all(is_finite(o.state) for o in self.reachable):
            self._copies = None

    @torch.no_grad()
    def before_update(self) -> bool:
        """Copy the states, if the gradients are not finite, or so large that squares overflow.

        A state can then be put back to what it was before the update that spoils it.

        Returns:
            Whether that was not needed.
        """
        if self._are_tame():
            return True
        former = self._copies or {}
        self._copies = {
            o: {
                p: copied(s) if is_finite(s) else former.get(o, {}).get(p) for p, s in state.items()
            }
            for o, state in ((each, each.state) for each in self.reachable)
        }
        return False

    def _are_tame(self) -> bool:
        members = [p for group in self.param_groups for p in group["params"]]
        if not all(p.is_cpu for p in members[:1]):  # a look would wait for the device
            return True
        if len(members) != self._members:
            self._pack(members)
        pairs = [(part, p.grad) for part, p in self._packed if p.grad is not None]
        found = [p.grad for p in self._large if p.grad is not None]
        if any(g.is_sparse for g in found) or any(g.is_sparse for _, g in pairs):
            return False
        if pairs:
            torch._foreach_copy_([part for part, _ in pairs], [g for _, g in pairs])
        total = [torch.linalg.vector_norm(g).square().float() for g in (*found, *self._packs)]
        if not total or bool(torch.stack(total).sum() < TAME):
            return True
        for pack in self._packs:
            pack.zero_()
        return False

    def _pack(self, members: list[torch.Tensor]) -> None:
        """Choose which gradients are checked together, as calls for each would take longer."""
        self._members = len(members)
        small = [p for p in members if p.numel() <= SMALL and p.dtype is torch.float32]
        chosen = set(map(id, small))
        self._large = [p for p in members if id(p) not in chosen]
        self._packed, self._packs = [], []
        if small:
            self._packs = [torch.zeros(sum(p.numel() for p in small))]
            parts = self._packs[0].split([p.numel() for p in small])
            self._packed = [(part.view(p.shape), p) for part, p in zip(parts, small)]

    def put_back(self) -> list[str]:
        """Make states finite that an update has spoilt; return the names of the optimizers.

        A state becomes what it was before the update. Where that is not known, on a device or where
        the averager was not told before, elements that are not finite become 0, and so does a count
        of steps, so that moments begin anew.
        """
        spoilt = []
        for optimizer in self.reachable:
            for parameter, state in list(optimizer.state.items()):
                if is_finite(state):
                    continue
                spoilt.append(type(optimizer).__name__)
                known = (self._copies or {}).get(optimizer, {parameter: None})
                if parameter not in known:  # made by that update
                    del optimizer.state[parameter]
                else:
                    optimizer.state[parameter] = known[parameter] or mended(state)
        self._copies = None
        return list(dict.fromkeys(spoilt))

    # Modes

    @property
    def with_modes(self) -> list[Any]:
        """Those with modes: in training the model is another one than what is to be evaluated."""
        return [each for each in self.given if mode_of(each) is not None]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the model that is to be evaluated in the block; the caller restores the values."""
        training = [each for each in self.with_modes if mode_of(each)]
        for each in training:
            each.eval()
        try:
            yield
        finally:
            for each in training:
                each.train()

    @contextmanager
    def training(self, averaged: bool | int | str) -> Iterator[None]:
        """Have the model that is trained in the block; the caller restores the values.

        Args:
            averaged: whether states are averaged, without which no mean is to be evaluated.

        Raises:
            ValueError: they are not, and an optimizer has modes.
        """
        evaluated = [each for each in self.with_modes if not mode_of(each)]
        if self.with_modes and not averaged:
            raise ValueError(
                f"last_average(): the model to evaluate depends on the state of {self}, which is "
                "not averaged: use averaged(), or average_state=True"
            )
        for each in evaluated:
            each.train()
        try:
            yield
        finally:
            for each in evaluated:
                each.eval()


def goes_back(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether a step of an optimizer undoes changes that others have made before it.

    A copy of it, where that is possible, makes two steps with a small parameter, and the second one
    has no gradient.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    try:
        copy, small = trial(optimizer, group, parameter)
        before = small.detach().clone()
        with torch.no_grad():
            small.add_(1)
            small.grad = torch.zeros_like(small)
        type(optimizer).step(copy)
    except Exception:
        return False
    return bool((small.detach() - before).abs().max() < 0.5)


def trial(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """Return a copy of an optimizer that has made a step with a small parameter, and that."""
    shape = SIZES[: max(parameter.ndim, 1)]
    small = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
    small.grad = torch.full_like(small, 0.5)
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).pop("step", None)  # which an averager may have replaced
    vars(copy).update({name: OrderedDict() for name in HOOKS}, state=defaultdict(dict))
    mode = {"train_mode": True} if "train_mode" in group else {}
    vars(copy)["param_groups"] = [{**group, **mode, "params": [small]}]
    step: Any = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(copy)  # without the hooks of all
    return copy, small


def copies_of_parameters(
    optimizers: Optimizers, parameters: list[Tensor]
) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
    """Yield what optimizers keep that equals a parameter, rounded to its dtype."""
    for optimizer in optimizers.reachable:
        if type(optimizer).__module__.startswith("torch.optim."):  # which keep none
            continue
        held = [(name, each) for s in optimizer.state.values() for name, each in tensors_in(s)]
        held += tensors_in(vars(optimizer) | {"state": None, "param_groups": None})
        for tensor in parameters:
            value = tensor.value.detach()
            for name, each in held:
                apart = each.data_ptr() != value.data_ptr()
                same = apart and each.shape == value.shape and bool(value.any())
                if same and torch.equal(each.detach().to(value.device, value.dtype), value):
                    yield optimizer, name, tensor


def tensors_in(values: Any, name: str = "", depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, with the name of the outermost one."""
    if isinstance(values, torch.Tensor):
        yield name, values
    elif depth and isinstance(values, Mapping):
        for key, value in values.items():
            yield from tensors_in(value, name or str(key), depth - 1)
    elif depth and isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value, name, depth - 1)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that makes the steps of one that another library has put around it.

    Raises:
        TypeError: it is not a `torch.optim.Optimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, a list of these, or None, not "
            f"{type(optimizer).__name__}: for one of another kind give None, and call "
            "averager.step() after each of its steps"
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in WRAPPERS:
            return unwrapped(vars(optimizer)[WRAPPERS[kind.__name__]])
    return optimizer


def reachable(given: Iterable[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    """Yield optimizers, and those in their attributes, once."""
    seen: set[int] = set()
    left: list[tuple[Any, int]] = [(each, 0) for each in given]
    while left:
        thing, depth = left.pop(0)
        if isinstance(thing, torch.optim.Optimizer):
            if id(thing) not in seen:
                seen.add(id(thing))
                yield thing
                named = vars(thing).items()
                left += [(v, 1) for k, v in named if k not in ("state", "param_groups")]
        elif depth < 3 and isinstance(thing, Mapping):
            left += [(each, depth + 1) for each in thing.values()]
        elif depth < 3 and isinstance(thing, (list, tuple)):
            left += [(each, depth + 1) for each in thing]


def mode_of(optimizer: Any) -> bool | None:
    """Return whether an optimizer is in its training mode; None: it has no modes."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        return None
    modes = [group["train_mode"] for group in optimizer.param_groups if "train_mode" in group]
    mode = modes[0] if modes else getattr(optimizer, "train_mode", None)
    return None if mode is None else bool(mode)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure, as LBFGS's does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_finite(state: Any) -> bool:
    """Return whether all floating-point numbers in a local optimizer's state are finite."""
    if isinstance(state, torch.Tensor):
        return bool((state._values() if state.is_sparse else state).isfinite().all())
    if isinstance(state, float):
        return math.isfinite(state)
    if isinstance(state, Mapping):
        return all(map(is_finite, state.values()))
    return not isinstance(state, (list, tuple)) or all(map(is_finite, state))


def copied(state: Any) -> Any:
    """Return a state with copies of its tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {name: copied(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [copied(value) for value in state]
    return state


def mended(state: Any) -> Any:
    """Return a state with 0 in place of what is not finite."""
    if isinstance(state, torch.Tensor):
        return state.nan_to_num_(0.0, 0.0, 0.0)
    if isinstance(state, float):
        return state if math.isfinite(state) else 0.0
    if isinstance(state, Mapping):
        return {n: each * 0 if n == "step" else mended(each) for n, each in state.items()}
    if isinstance(state, (list, tuple)):
        return [mended(value) for value in state]
    return state
