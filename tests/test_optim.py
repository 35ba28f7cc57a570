"""WAGMA as an optimizer, in one process: what torch and its users expect of it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import collectives
from collectives.topology import default_group_size
from wagma.optim import WAGMA, Allreduce

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


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("late", ["paper", "conserving"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_rank_trains_as_the_wrapped_optimizer_alone(make, late, overlap):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = make(plain.parameters())
    with wrap(model, make, sync_period=3, late=late, overlap=overlap) as optimizer:
        for step in range(7):
            loss = backward(plain, step)
            alone.step()
            assert backward(model, step).item() == pytest.approx(loss.item(), rel=1e-5)
            optimizer.step()
            synchronized = (step + 1) % 3 == 0
            if synchronized or not overlap:
                assert optimizer.result.version == step
                assert optimizer.result.synchronized == synchronized
                assert optimizer.results[-1] is optimizer.result
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

        saved = copy.deepcopy(optimizer.state_dict())
        backward(model)
        optimizer.step()
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups is inner.param_groups
        assert {entry["step"].item() for entry in inner.state.values()} == {1}


@pytest.mark.parametrize(
    "make",
    [
        *OPTIMIZERS.values(),
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
        torch.optim.NAdam,
        torch.optim.Rprop,
        lambda p: torch.optim.LBFGS(p, max_iter=2),
    ],
    ids=[*OPTIMIZERS, "adagrad", "nadam", "rprop", "lbfgs"],
)
def test_state_that_an_update_has_spoilt_is_made_anew(make):
    plain, model = make_model(), make_model()
    alone = make(plain.parameters())
    with wrap(model, make, late="conserving") as optimizer:

        def closure(network, step, spoil):
            loss = backward(network, step)
            for parameter in network.parameters():
                parameter.grad.mul_(torch.nan if spoil else 1)
            return loss * (torch.nan if spoil else 1)

        optimizer.step(lambda: closure(model, 0, spoil=False))
        plain.load_state_dict(model.state_dict())
        optimizer.step(lambda: closure(model, 1, spoil=True))
        assert_equal_states(model.parameters(), plain.parameters())
        for step in (2, 3):
            optimizer.step(lambda step=step: closure(model, step, spoil=False))
            alone.step(lambda step=step: closure(plain, step, spoil=False))
    assert_equal_states(model.parameters(), plain.parameters())


def test_its_attributes_are_set_on_the_wrapped_one():
    model = make_model()
    with wrap(model) as optimizer:
        backward(model)
        optimizer.step()
        optimizer.state = type(optimizer.state)(dict)
        optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.5}]
        assert not optimizer.optimizer.state
        assert optimizer.optimizer.param_groups[0]["lr"] == 0.5


def test_hooks_run_once_a_step():
    model, calls = make_model(), []

    def note(name):
        return lambda *_: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        with wrap(model) as optimizer:
            optimizer.register_step_pre_hook(note("pre"))
            optimizer.optimizer.register_step_post_hook(note("post"))
            backward(model)
            optimizer.step()
            optimizer.register_state_dict_pre_hook(note("state"))
            optimizer.state_dict()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post", "global post", "state"]


def test_a_copy_is_refused_and_the_wrapped_one_can_be_copied():
    with wrap(make_model()) as optimizer:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a WAGMA optimizer cannot be copied or pickled"):
                make(optimizer)
        copy.deepcopy(optimizer.optimizer).step()  # nobody's, so it may


def test_a_step_of_the_wrapped_optimizer_alone_is_refused_until_it_is_free_again():
    model = make_model()
    inner = OPTIMIZERS["sgd"](model.parameters())
    with WAGMA(inner, model, comm=MPI.COMM_SELF) as optimizer:
        backward(model)
        before = state(model)
        with pytest.raises(RuntimeError, match="step the WAGMA optimizer, not the one that it wr"):
            inner.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="step the WAGMA optimizer"):
            scaler.step(inner)
        assert_equal_states(state(model)[:2], before[:2])
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="step the WAGMA optimizer"):
            inner.step()
    inner.step()


def test_a_model_or_optimizer_is_wrapped_once_at_a_time():
    model = make_model()
    inner = OPTIMIZERS["sgd"](model.parameters())
    with WAGMA(inner, model, comm=MPI.COMM_SELF) as optimizer:
        with pytest.raises(TypeError, match="optimizer is a WAGMA optimizer already"):
            WAGMA(optimizer, model, comm=MPI.COMM_SELF)
        for part in (model, nn.Sequential(nn.Linear(4, 4), model)):
            with pytest.raises(
                ValueError, match=r"parameter '.*0\.weight' belongs to another WAGMA"
            ):
                wrap(part)
        inner.param_groups[0]["params"] = []
        with pytest.raises(ValueError, match="optimizer belongs to another WAGMA"):
            WAGMA(inner, make_model(), comm=MPI.COMM_SELF)
    with wrap(model) as optimizer:
        backward(model)
        optimizer.step()


def test_an_optimizer_that_is_itself_a_wrapper_can_be_wrapped():
    class Outer(torch.optim.Optimizer):
        def __init__(self, base):
            self.base, self.defaults, self.state = base, {}, {}
            self.param_groups = base.param_groups

        def step(self):  # no closure
            self.base.step()

    model = make_model()
    with wrap(model, lambda p: Outer(torch.optim.SGD(p, lr=0.1))) as optimizer:
        before = model[0].weight.detach().clone()
        backward(model)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


def test_the_communicator_must_be_one():
    model = make_model()
    with pytest.raises(TypeError, match="comm is of type str, not an mpi4py intracommunicator"):
        WAGMA(OPTIMIZERS["sgd"](model.parameters()), model, comm="world")


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        (-1, ValueError, r"weight is -1, not between 0 and 1e\+100"),
        (float("nan"), ValueError, "weight is nan"),
        (float("inf"), ValueError, "weight is inf"),
        ("2", TypeError, "weight is a str, not a number"),
    ],
)
def test_a_weight_that_is_none_is_refused_before_the_step(weight, kind, message):
    model = make_model()
    with wrap(model) as optimizer:
        backward(model)
        before = state(model)
        with pytest.raises(kind, match=message):
            optimizer.step(weight=weight)
        assert optimizer.collective.version == 0
        assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def test_a_weight_reaches_the_collective_by_every_way_of_stepping():
    model, calls = make_model(), []
    with wrap(model) as optimizer:
        optimizer.collective = Recorder(optimizer.collective, calls)
        backward(model)
        optimizer.step()
        optimizer.step(lambda: backward(model), weight=2)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer.step(weight=0.5)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer, weight=0)
    assert [call["weight"] for call in calls] == [1, 2, 0.5, 0]


class Recorder:
    """A collective that notes its settings instead of averaging."""

    def __init__(self, collective, calls):
        self.collective, self.calls = collective, calls

    def __call__(self, vector, **settings):
        self.calls.append(settings)

    def __getattr__(self, name):
        return getattr(self.collective, name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("outside", [True, False], ids=["ours", "wrapped"])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, threshold=1e9, patience=1),
    ],
    ids=["step", "cosine", "one-cycle", "lambda", "plateau"],
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
                loss = backward(network)
                step()
                plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
                schedule.step(*([loss.item()] if plateau else []))
            assert optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
        assert alone.param_groups[0]["lr"] != 0.1
    assert_equal_states(state(model), state(plain))


SCALED = {
    "sgd": OPTIMIZERS["sgd"],
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adam": OPTIMIZERS["adam"],
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def train_scaled(model, optimizer, scaler, clip, overflows=()):
    """Make five steps, those of `overflows` with infinite gradients, and return the scales."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).square().mean()
        scaler.scale(loss * (torch.inf if step in overflows else 1)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("overflows", [(), (2,), (3, 4)])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
def test_grad_scaler_scales_and_skips_as_with_the_optimizer_alone(make, clip, overflows):
    plain, model = make_model(), make_model()
    settings = {"device": "cpu", "init_scale": 2.0**10, "growth_interval": 2}
    expected = train_scaled(
        plain, make(plain.parameters()), torch.amp.GradScaler(**settings), clip, overflows
    )
    with wrap(model, make, late="paper") as optimizer:
        scaler = torch.amp.GradScaler(**settings)
        scales = train_scaled(model, optimizer, scaler, clip, overflows)
        assert optimizer.collective.version == 5
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    assert scales == expected and len(set(scales)) > 1
    assert_equal_states(state(model), state(plain))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_step_that_grad_scaler_skips_is_a_version_that_changes_nothing(clip):
    model = make_model()
    with wrap(model, OPTIMIZERS["adam"], late="paper") as optimizer:
        before = [value.clone() for value in model.parameters()]
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
        scaler = torch.amp.GradScaler("cpu")
        train_scaled(model, optimizer, scaler, clip, overflows=range(5))
        assert optimizer.collective.version == 5
        assert not calls and not optimizer.state
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_allreduce_goes_on_after_an_overflow_in_parameters_that_no_group_has():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with Allreduce(head, model, comm=MPI.COMM_SELF) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(3):
            before = model[1].weight.detach().clone()
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            scaler.scale(loss * (torch.inf if step == 0 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.result.weight == (step > 0)
            assert torch.equal(model[1].weight, before) == (step == 0)


def test_grad_scaler_still_refuses_what_it_refuses():
    model = make_model()
    with wrap(model) as optimizer:
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(AssertionError, match="did not use scaler.scale"):
            scaler.step(optimizer)
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="unscale_.. has already been called"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="GradScaler does not support closures"):
            scaler.step(optimizer, lambda: backward(model))
        assert optimizer.collective.version == 0
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called since the last update"):
            scaler.step(optimizer)
        assert optimizer.collective.version == 1


def test_a_disabled_grad_scaler_does_nothing():
    plain, model = make_model(), make_model()
    train_scaled(plain, OPTIMIZERS["sgd"](plain.parameters()), torch.amp.GradScaler("cpu"), True)
    with wrap(model) as optimizer:
        train_scaled(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), clip=True)
    assert_equal_states(state(model), state(plain))


def test_a_closure_evaluates_and_its_loss_is_returned():
    model, calls = make_model(), []

    def closure():
        calls.append(1)
        return backward(model)

    with wrap(model, lambda p: torch.optim.LBFGS(p, max_iter=4)) as optimizer:
        first = optimizer.step(closure).item()
        assert len(calls) > 1
        assert optimizer.step(closure).item() < first
        assert optimizer.collective.version == 2
        with pytest.raises(TypeError, match="closure"):
            optimizer.step()
    with wrap(make_model()) as optimizer:
        assert optimizer.step(lambda: 3) == 3
        assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_several_backward_passes(set_to_none):
    plain, model = make_model(), make_model()
    alone = OPTIMIZERS["adam"](plain.parameters())
    with wrap(model, OPTIMIZERS["adam"]) as optimizer:
        for network, either in ((plain, alone), (model, optimizer)):
            for _ in range(3):
                either.zero_grad(set_to_none)
                for part in torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)):
                    (network(part).square().mean() / 4).backward()
                either.step()
    assert_equal_states(state(model), state(plain))


def test_several_groups_with_settings_that_the_user_edits():
    plain, model = make_model(), make_model()

    def make(network):
        bias = {"params": [network[0].bias, network[3].bias], "lr": 0.5, "momentum": 0.0}
        rest = {"params": [network[0].weight, network[3].weight]}
        return torch.optim.SGD([rest, bias], lr=0.1, momentum=0.9)

    alone = make(plain)
    with WAGMA(make(model), model, comm=MPI.COMM_SELF) as optimizer:
        for network, either in ((plain, alone), (model, optimizer)):
            for step in range(3):
                backward(network, step)
                either.step()
                either.param_groups[1]["lr"] /= 2
                either.param_groups[0]["weight_decay"] = 0.1
    assert_equal_states(state(model), state(plain))


def test_parameters_without_a_gradient_stay():
    model = make_model()
    with wrap(model) as optimizer:
        model[3].weight.requires_grad_(False)
        before = state(model[3])
        for _ in range(2):
            backward(model)
            model[3].bias.grad = None
            optimizer.step()
        assert torch.equal(model[3].weight, before[0]) and torch.equal(model[3].bias, before[1])
        optimizer.zero_grad()
        optimizer.step()
        assert optimizer.collective.version == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    ("when", "overlap"),
    [("before", True), ("after", False), ("step", False), ("step", True), ("wrapped-step", False)],
)
def test_compiled_models_and_steps(when, overlap):
    def compiled(function):
        torch._dynamo.reset()
        return torch.compile(function, backend="eager")

    plain = make_model()
    alone = OPTIMIZERS["adam"](plain.parameters())
    if "step" in when:  # its arithmetic differs from the other's in the last bit
        alone.step = compiled(alone.step)
    model = network = compiled(make_model()) if when == "before" else make_model()
    with wrap(model, OPTIMIZERS["adam"], late="paper", overlap=overlap) as optimizer:
        step = optimizer.step
        if when == "after":
            network = compiled(model)
        elif when == "step":
            step = compiled(optimizer.step)
        elif when == "wrapped-step":
            optimizer.optimizer.step = compiled(optimizer.optimizer.step)
        for number in range(3):
            for one, take in ((plain, alone.step), (network, step)):
                one.zero_grad()
                batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
                one(batch).square().mean().backward()
                take()
        optimizer.complete()
        assert optimizer.collective.version == 3
    assert_equal_states(state(model), state(plain))


def test_a_graph_from_before_an_overlapped_average_cannot_be_differentiated_after_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with wrap(model, overlap=True) as optimizer:
        optimizer.step()
        loss = model(torch.ones(2)).sum()
        optimizer.complete()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_from_before_an_average_cannot_be_differentiated_with_the_new_values():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with wrap(model) as optimizer:
        for change in (optimizer.synchronize, optimizer.step):  # a step without a gradient
            loss = model(torch.ones(2)).sum()
            change()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
        loss = model(torch.ones(2)).sum()
        with optimizer.averaged():
            pass
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_wrapping_and_evaluating_without_gradients_leave_a_model_that_trains(mode):
    model = make_model()
    with mode():
        optimizer = wrap(model, OPTIMIZERS["adam"])
    with optimizer:
        with mode(), optimizer.averaged():
            model(torch.ones(2, 4))
        backward(model)
        optimizer.step()


def test_a_group_of_the_models_parameters_can_join_and_a_stranger_cannot():
    model, other = make_model(), nn.Linear(2, 2)
    model[0].requires_grad_(False)
    with wrap(model, lambda _: torch.optim.SGD(model[3].parameters(), lr=0.1)) as optimizer:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
        with pytest.raises(ValueError, match=r"parameter 0 of group 2, shape \(2, 2\)"):
            optimizer.add_param_group({"params": other.parameters()})
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": model[3].parameters()})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        before = model[0].weight.detach().clone()
        backward(model)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


def test_a_stranger_that_came_by_another_way_is_refused_before_the_next_step():
    model, other = make_model(), nn.Linear(2, 2)
    with wrap(model) as optimizer:
        backward(model)
        before = state(model)
        optimizer.optimizer.add_param_group({"params": other.parameters()})
        for _ in range(2):
            with pytest.raises(ValueError, match=r"of group 1, .* was not in the model when"):
                optimizer.step()
        assert_equal_states(state(model), before)
        del optimizer.param_groups[1]
        optimizer.step()


def test_an_infinite_frozen_parameter_cannot_be_trained_later():
    model = make_model()
    model.limit = nn.Parameter(torch.tensor(torch.inf), requires_grad=False)
    with wrap(model) as optimizer:
        backward(model)
        optimizer.step()
        model.limit.requires_grad_(True)
        for call in (optimizer.step, lambda: optimizer.add_param_group({"params": []})):
            with pytest.raises(ValueError, match=r"shape \(\), was frozen and not finite when"):
                call()


def test_a_parameter_that_is_frozen_or_unfrozen_later():
    plain, model = make_model(), make_model()
    alone = OPTIMIZERS["adam"](plain.parameters())
    for network in (plain, model):
        network[0].requires_grad_(False)
    with wrap(model, OPTIMIZERS["adam"]) as optimizer:
        for network, either in ((plain, alone), (model, optimizer)):
            for step in range(6):
                network[0].requires_grad_(step in (2, 3))
                backward(network, step)
                either.step()
    assert_equal_states(state(model), state(plain))


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


class Seen(nn.Module):
    """Counts its batches in a buffer that it replaces, and has a mask of the last one's length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.full((1,), -torch.inf), persistent=False)

    def forward(self, batch):
        self.seen = self.seen + 1
        self.mask = torch.full((len(batch),), -torch.inf)
        return self.linear(batch)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_buffers_that_the_module_replaces_in_averaged_are_what_they_were(mode):
    model = Seen()
    with wrap(model) as optimizer:
        for batches in range(1, 4):
            backward(model)
            optimizer.step()
            seen, mask = model.seen, model.mask
            with optimizer.averaged(), mode():
                model(torch.randn(5, 4))
                model.seen += 1
                assert model.seen == batches + 2 and len(model.mask) == 5
            assert model.seen is seen and model.mask is mask
            assert model.seen == batches and len(model.mask) == 16
        with mode():
            model(torch.randn(5, 4))
            with optimizer.averaged():
                model(torch.randn(7, 4))
        assert model.seen == 4 and len(model.mask) == 5


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


def test_nothing_of_a_closed_one_stays_in_the_wrapped_optimizer():
    model = make_model()
    inner = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(3):
        with WAGMA(inner, model, comm=MPI.COMM_SELF):
            assert len(inner._optimizer_step_pre_hooks) == 1
    assert not inner._optimizer_step_pre_hooks


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


def test_importing_does_not_initialize_mpi():
    code = "import sys, wagma.optim; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
