"""What every method does in one process, and what the registry of algorithms says of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from methods import METHODS, backward, each_method, make_model, momentum_sgd
from mpi4py import MPI
from protocol_messages import protocols
from torch import nn

import collectives
from wagma import algorithms, optim
from wagma.optim.averaging import Averaging

ALONE = MPI.COMM_SELF


@each_method
def test_one_rank_trains_as_the_wrapped_optimizer_alone(method):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = momentum_sgd(plain.parameters())
    with method.wrap(model, ALONE) as optimizer:
        for step in range(9):
            loss = backward(plain, 0, step)
            alone.step()
            own = optimizer.step(lambda step=step: backward(model, 0, step))
            torch.testing.assert_close(own, loss, rtol=method.rounding, atol=0)
        optimizer.complete()
        assert optimizer.result.version == 8 and optimizer.results[-1] is optimizer.result
        assert optimizer.result.group == (0,) and optimizer.result.timely
        assert repr(optimizer).startswith(f"{method.kind.__name__} (")
    for one, other in zip(model.state_dict().values(), plain.state_dict().values()):
        torch.testing.assert_close(one, other, rtol=1e-6 + method.rounding, atol=1e-6)


@each_method
def test_a_model_or_optimizer_is_wrapped_once_at_a_time_and_is_free_after_closing(method):
    kind = method.kind.__name__
    model = make_model()
    inner = momentum_sgd(model.parameters())
    optimizer = method.kind(inner, model, comm=ALONE, **method.settings)
    backward(model, 0, 0)
    before = model[0].weight.detach().clone()
    for other in METHODS.values():
        with pytest.raises(TypeError, match=f"optimizer is a {kind} optimizer already: pass the"):
            other.kind(optimizer, model, comm=ALONE, **other.settings)
        with pytest.raises(ValueError, match=f"'0.weight' belongs to another {kind} optimizer"):
            other.wrap(model, ALONE)
    with pytest.raises(RuntimeError, match=f"step the {kind} optimizer, not the one that it wr"):
        inner.step()
    with optimizer.averaged():
        for call in (optimizer.step, optimizer.synchronize, optimizer.averaged().__enter__):
            with pytest.raises(RuntimeError, match="inside averaged"):
                call()
    assert torch.equal(model[0].weight, before)
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.synchronize, optimizer.averaged().__enter__):
        with pytest.raises(collectives.ClosedError, match=f"this {kind} optimizer is closed"):
            call()
    assert torch.equal(model[0].weight, before)
    inner.step()
    assert not torch.equal(model[0].weight, before)


@each_method
def test_a_wrong_weight_an_unknown_argument_and_a_replaced_parameter_are_refused(method):
    with pytest.raises(TypeError, match=f"{method.kind.__name__} has no argument 'speed'"):
        method.wrap(make_model(), ALONE, speed=3)
    model = make_model()
    with method.wrap(model, ALONE) as optimizer:
        backward(model, 0, 0)
        with pytest.raises(ValueError, match="weight is -1"):
            optimizer.step(weight=-1)
        assert optimizer.collective.version == 0
        model.double()
        for call in (optimizer.step, optimizer.synchronize, optimizer.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was replaced"):
                call()


@each_method
def test_steps_that_grad_scaler_skips_count_and_change_nothing(method):
    model = make_model()
    with method.wrap(model, ALONE) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [value.detach().clone() for value in model.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum() * torch.inf).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1.0
        assert optimizer.collective.version == 2 and not optimizer.state
        optimizer.complete()
        for value, old in zip(model.parameters(), before):
            torch.testing.assert_close(value.detach(), old, rtol=0, atol=0)
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="GradScaler does not support closures"):
            scaler.step(optimizer, lambda: 1)


def test_optimizers_that_call_a_closure_often_cannot_average_gradients():
    model = make_model()
    for kind in (optim.Allreduce, optim.EagerSGD):
        message = f"LBFGS evaluates a closure several times .* {kind.__name__} could not average"
        with pytest.raises(TypeError, match=message):
            kind(torch.optim.LBFGS(model.parameters()), model, comm=ALONE)
        with pytest.raises(TypeError, match=f"{kind.__name__} has no argument 'wire_dtype'"):
            kind(momentum_sgd(model.parameters()), model, comm=ALONE, wire_dtype="float16")
        with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, not str"):
            kind("sgd", model, comm=ALONE)


def test_sparse_gradients_are_refused_by_name():
    model = nn.Embedding(5, 2, sparse=True)
    with optim.Allreduce(torch.optim.SGD(model.parameters(), lr=1), model, comm=ALONE) as optimizer:
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="parameter 'weight' has a gradient that is .*sparse"):
            optimizer.step()


# The registry


def test_every_method_has_an_algorithm_and_every_algorithm_a_method():
    kinds = {getattr(optim, entry.optimizer) for entry in algorithms.ALGORITHMS.values()}
    assert kinds == {method.kind for method in METHODS.values()}
    assert all(issubclass(kind, Averaging) for kind in kinds)
    assert algorithms.DEFAULT in algorithms.ALGORITHMS
    for entry in algorithms.ALGORITHMS.values():
        assert set(entry.options) <= set(algorithms.DEFAULTS)


SECONDS = np.array([[1.0, 1.0, 5.0, 1.0, 1.0], [2.0, 3.0, 1.0, 2.0, 1.0]])
BOUNDS = {  # with periods of two steps
    "wagma": 5.0 + 6.0 + 1.0,
    "allreduce": 2.0 + 3.0 + 5.0 + 2.0 + 1.0,
    "local-sgd": 5.0 + 6.0 + 1.0,
    "d-psgd": 9.0,
    "sgp": 13.0,
    "ad-psgd": 9.0,
    "parameter-server": 13.0,
    "eager-sgd": 5.0 + 6.0 + 1.0,
}
SETTINGS = {
    "sync_period": 2,
    "clock": "neighbours",
    "neighbors": 1,
    "mode": "bsp",
    "backups": 1,
    "trigger": "solo",
}


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_the_bound_is_of_who_waits_for_whom(name):
    bound = algorithms.ALGORITHMS[name].bound(SECONDS, SETTINGS)
    assert isinstance(bound, float) and bound == BOUNDS[name]


def test_with_majority_who_comes_first_waits_for_the_rank_that_is_drawn():
    seconds = np.array([[1.0, 9.0, 1.0], [4.0, 1.0, 1.0]])
    draws = [protocols.drawn(0, step, 2) for step in range(2)]
    expected = {(0, 0): 10 + 1.0, (0, 1): 10 + 1.0, (1, 0): 13 + 1.0, (1, 1): 13 + 1.0}
    settings = {"sync_period": 3, "trigger": "majority"}
    bound = algorithms.ALGORITHMS["eager-sgd"].bound(seconds, settings)
    assert bound == expected[tuple(draws)]
