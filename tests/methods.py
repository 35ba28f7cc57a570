"""The methods of `wagma.optim`, and a small model to train: a new method adds a line."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import nn

from wagma import optim


class Method(NamedTuple):
    """One way to train.

    Args:
        kind: the class.
        settings: its arguments, such that a period has several steps, if it has periods.
        repeatable: whether a run gives the same model every time, bit for bit.
        holds: whether a rank holds the model of it that others average with.
        rounding: relative error of one rank's steps beside those of the optimizer alone.
        exclusive: whether a step may wait for other ranks' next steps, so that none of them may
            wait for this rank in a barrier or in another optimizer's step.
        in_step: whether ranks make the same steps, and versions number these.
        vectors: how many of the model's length it has beside the collective's and the momentum.
    """

    kind: type
    settings: dict
    repeatable: bool = True
    holds: bool = True
    rounding: float = 0
    exclusive: bool = False
    in_step: bool = True
    vectors: int = 1

    def make(self, model, comm, make=None, **settings):
        """Return an averager, beside a new optimizer of the model's parameters."""
        settings = {**self.settings, **settings}
        if "group_size" in settings:
            settings["group_size"] = min(settings["group_size"], max(comm.size, 2))
        return self.kind(model, (make or momentum_sgd)(model.parameters()), comm=comm, **settings)

    def training(self, model, comm, make=None, **settings):
        """Return a block of the optimizer and the averager: see `opened`."""
        return opened(self.make(model, comm, make, **settings))


@contextmanager
def opened(averager):
    """Yield an averager's only optimizer, and the averager; close that at the block's end."""
    with averager:
        yield averager.optimizers.given[0], averager


# For ranks with different data.
SHARDS = {"average_state": True, "correction": "control-variates"}

METHODS = {
    "wagma": Method(optim.WAGMA, {"sync_period": 4}, repeatable=False),
    "wagma-group": Method(optim.WAGMA, {"sync_period": 4, "wait": "group"}),
    "wagma-overlap": Method(optim.WAGMA, {"sync_period": 4, "wait": "group", "overlap": True}),
    "wagma-shards": Method(
        optim.WAGMA, {"sync_period": 4, **SHARDS}, repeatable=False, rounding=1e-5, vectors=5
    ),
    "allreduce": Method(optim.Allreduce, {}),
    "eager-sgd": Method(optim.EagerSGD, {"sync_period": 4}, False, rounding=1e-5),
    "eager-sgd-majority": Method(
        optim.EagerSGD, {"sync_period": 4, "trigger": "majority"}, False, rounding=1e-5
    ),
    "local-sgd": Method(optim.LocalSGD, {"sync_period": 4}),
    "local-sgd-solo": Method(
        optim.LocalSGD,
        {"sync_period": 4, "trigger": "solo", "weights": "work"},
        repeatable=False,
        exclusive=True,
        in_step=False,
    ),
    "d-psgd": Method(optim.DPSGD, {}),
    "hop": Method(optim.Hop, {}),
    "hop-staleness": Method(optim.Hop, {"staleness": 2, "order": "serial"}, repeatable=False),
    "sgp": Method(optim.SGP, {}),
    "ad-psgd": Method(optim.ADPSGD, {}, repeatable=False, holds=False),
    "parameter-server": Method(optim.ParameterServer, {}, repeatable=False),
    "parameter-server-local": Method(
        optim.ParameterServer,
        {"mode": "async-local", "local_steps": 3, "outer_momentum": 0.0, "outer_rate": 1.0},
        repeatable=False,
        rounding=1e-5,
        exclusive=True,  # without a progress thread
        in_step=False,
    ),
    # All ranks: one that is left over by smaller groups waits in its step for others, and must not
    # be waited for outside.
    "partial-reduce": Method(optim.PartialReduce, {"group_size": 8}),
    "ripples": Method(optim.Ripples, {}, repeatable=False, exclusive=True),
    "ripples-random": Method(optim.Ripples, {"groups": "random"}, False, exclusive=True),
    "ripples-static": Method(optim.Ripples, {"groups": "static"}),
}

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)

in_step = {name: method for name, method in METHODS.items() if method.in_step}
each_method_in_step = pytest.mark.parametrize("method", in_step.values(), ids=in_step)


def momentum_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = {
    "sgd": momentum_sgd,
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def make_model(seed=0, dtype=torch.float32, width=8):
    torch.manual_seed(seed)
    layers = nn.Linear(4, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, 3)
    model = nn.Sequential(*layers)
    return model.to(dtype)


def backward(model, rank, step):
    """Leave the gradient of this rank's own batch of the step in the model; return the loss."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    batch = torch.randn(16, 4, generator=generator).to(next(model.parameters()))
    model.zero_grad()
    loss = (model(batch) - rank).square().mean()
    loss.backward()
    return loss


def floats(model):
    """Return the floating-point tensors of the model as one new array."""
    values = [v for v in model.state_dict().values() if v.is_floating_point()]
    return torch.cat([value.flatten() for value in values]).cpu().numpy()


def set_floats(model, vector):
    start = 0
    for value in model.state_dict().values():
        if value.is_floating_point():
            part = vector[start : start + value.numel()]
            value.copy_(torch.from_numpy(part).view(value.shape))
            start += value.numel()


def bits(values) -> bytes:
    """Return the memory of some tensors."""
    dense = (value.detach().contiguous().cpu() for value in values)
    return b"".join(value.flatten().view(torch.uint8).numpy().tobytes() for value in dense)


def bits_of(model) -> bytes:
    return bits(model.state_dict().values())


def local_bits(optimizer) -> bytes:
    """Return the memory of the local optimizer's state."""
    entries = optimizer.state.values()
    return bits(value for entry in entries for value in entry.values() if value is not None)


def checkpoint(model, optimizer, averager):
    """Return what a file with all of their states would give back."""
    averager.complete()
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (model, optimizer, averager)], file)
    file.seek(0)
    return torch.load(file)


def restore(saved, model, optimizer, averager):
    """Load what `checkpoint` has returned."""
    for each, state in zip((model, optimizer, averager), saved, strict=True):
        each.load_state_dict(state)


def train(
    comm,
    steps,
    each_step=lambda averager: None,
    make=momentum_sgd,
    dtype=torch.float32,
    **settings,
):
    """Train a model of this rank's with WAGMA, call `each_step` after each step, and return it."""
    model = make_model(comm.rank, dtype)
    optimizer = make(model.parameters())
    with optim.WAGMA(model, optimizer, comm=comm, **settings) as averager:
        for step in range(steps):
            backward(model, comm.rank, step)
            optimizer.step()
            each_step(averager)
    return model
