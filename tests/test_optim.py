"""WAGMA as an optimiser, in one process: what torch and its users expect of it."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from mpi4py import MPI
from torch import nn

import collectives
from wagma.optim import WAGMA
from wagma.optim.wagma import default_group_size

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
}


def make_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def wrap(model, make=OPTIMIZERS["sgd"], **settings):
    return WAGMA(make(model.parameters()), model, comm=MPI.COMM_SELF, **settings)


def backward(model, step=0):
    """Leave the gradient of the step's batch in the model and return the loss."""
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    loss = model(torch.randn(16, 4, generator=generator)).square().mean()
    loss.backward()
    return loss


def state(model):
    return [value.clone() for value in model.state_dict().values()]


def assert_equal_states(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 4), (8, 4), (16, 4), (64, 8)]
)
def test_default_group_size_is_the_papers(size, expected):
    assert default_group_size(size) == expected


@pytest.mark.parametrize("late", ["paper", "conserving"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_rank_trains_as_the_wrapped_optimizer_alone(make, late):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = make(plain.parameters())
    with wrap(model, make, sync_period=3, late=late) as optimizer:
        for step in range(7):
            loss = backward(plain, step)
            alone.step()
            assert backward(model, step).item() == pytest.approx(loss.item(), rel=1e-5)
            optimizer.step()
            assert optimizer.result.version == step
            assert optimizer.result.synchronized == ((step + 1) % 3 == 0)
    assert_equal_states(state(model), state(plain))


def test_it_is_an_optimizer_that_shares_the_wrapped_ones_groups_and_state():
    model = make_model()
    inner = OPTIMIZERS["adam"](model.parameters())
    with WAGMA(inner, model, comm=MPI.COMM_SELF) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.optimizer is inner
        assert optimizer.defaults is inner.defaults
        assert optimizer.param_groups is inner.param_groups
        backward(model)
        optimizer.step()
        assert optimizer.state is inner.state and len(optimizer.state) == 6
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert repr(optimizer).startswith("WAGMA (")

        saved = copy.deepcopy(optimizer.state_dict())
        backward(model)
        optimizer.step()
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups is inner.param_groups
        assert {entry["step"].item() for entry in inner.state.values()} == {1}


def test_hooks_run_once_a_step():
    model, calls = make_model(), []
    with wrap(model) as optimizer:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        backward(model)
        optimizer.step()
    assert calls == ["pre", "post"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("outside", [True, False], ids=["ours", "wrapped"])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    ],
    ids=["step", "cosine", "one-cycle"],
)
def test_schedulers_drive_either_object(make, outside):
    plain, model = make_model(), make_model()
    alone = OPTIMIZERS["sgd"](plain.parameters())
    expected = make(alone)
    with wrap(model) as optimizer:
        scheduler = make(optimizer if outside else optimizer.optimizer)
        for _ in range(5):
            for network, step, schedule in (
                (plain, alone.step, expected),
                (model, optimizer.step, scheduler),
            ):
                backward(network)
                step()
                schedule.step()
            assert optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
    assert_equal_states(state(model), state(plain))


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_unscales_for_either_kind_of_wrapped_optimizer(fused):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)  # unlike Adam not indifferent to scale
    with wrap(model, lambda p: torch.optim.SGD(p, lr=0.1, fused=fused)) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            backward(plain, step)
            alone.step()
            optimizer.zero_grad()
            batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(state(model), state(plain), rtol=1e-4, atol=1e-5)


def test_a_closure_evaluates_and_its_loss_is_returned():
    model = make_model()
    with wrap(model, lambda p: torch.optim.LBFGS(p, max_iter=4)) as optimizer:
        first = optimizer.step(lambda: backward(model)).item()
        assert optimizer.step(lambda: backward(model)).item() < first


def test_a_group_of_the_models_parameters_can_join_and_a_stranger_cannot():
    model, other = make_model(), nn.Linear(2, 2)
    model[0].requires_grad_(False)
    with wrap(model, lambda _: torch.optim.SGD(model[3].parameters(), lr=0.1)) as optimizer:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
        with pytest.raises(ValueError, match=r"parameter 0 of group 2, shape \(2, 2\)"):
            optimizer.add_param_group({"params": other.parameters()})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        before = model[0].weight.detach().clone()
        backward(model)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


def test_synchronize_and_averaged_alone_keep_the_model_bit_for_bit():
    model = make_model()
    with wrap(model) as optimizer:
        backward(model)
        optimizer.step()
        before = state(model)
        optimizer.synchronize()
        with optimizer.averaged():
            assert_equal_states(state(model), before)
        for one, other in zip(state(model), before, strict=True):
            assert torch.equal(one, other)
        assert optimizer.collective.version == 1


def test_a_body_of_averaged_that_raises_or_spoils_the_model_leaves_it_as_it_was():
    model = make_model()
    with wrap(model) as optimizer:
        before = state(model)

        @optimizer.averaged()
        def spoil():
            model(torch.randn(5, 4))
            nn.init.zeros_(model[0].weight)
            raise KeyError

        with pytest.raises(KeyError):
            spoil()
        for one, other in zip(state(model), before, strict=True):
            assert torch.equal(one, other)
        backward(model)
        optimizer.step()


def test_training_inside_averaged_is_refused():
    model = make_model()
    with wrap(model) as optimizer:
        with optimizer.averaged():
            for call in (optimizer.step, optimizer.synchronize, optimizer.averaged().__enter__):
                with pytest.raises(RuntimeError, match="inside averaged"):
                    call()
        backward(model)
        optimizer.step()


def test_a_closed_one_refuses_and_leaves_the_model_usable():
    model = make_model()
    optimizer = wrap(model)
    optimizer.close()
    optimizer.close()
    assert optimizer.collective.closed
    before = state(model)
    backward(model)
    for call in (optimizer.step, optimizer.synchronize, optimizer.averaged().__enter__):
        with pytest.raises(collectives.ClosedError):
            call()
    assert torch.equal(model[0].weight, before[0])


def test_leaving_by_an_exception_closes():
    with pytest.raises(KeyError), wrap(make_model()) as optimizer:
        raise KeyError
    assert optimizer.collective.closed


def test_replaced_memory_raises_instead_of_averaging_the_wrong_memory():
    model = make_model()
    with wrap(model) as optimizer:
        model.double()
        for call in (optimizer.step, optimizer.synchronize, optimizer.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was replaced"):
                call()


def test_what_cannot_be_averaged_raises_before_the_first_step():
    model = make_model()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="parameter 'phase' is torch.complex64"):
        wrap(model)


def test_importing_does_not_initialise_mpi():
    code = "import sys, wagma.optim; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
