"""WAGMA beside an optimizer, in one process: what torch and its users expect of both."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from methods import opened
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


def beside(model, make=OPTIMIZERS["sgd"], **settings):
    return WAGMA(model, make(model.parameters()), comm=MPI.COMM_SELF, **settings)


def training(model, make=OPTIMIZERS["sgd"], **settings):
    return opened(beside(model, make, **settings))


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
def test_one_rank_trains_as_the_optimizer_alone(make, late, overlap):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = make(plain.parameters())
    settings = {"sync_period": 3, "late": late, "overlap": overlap}
    with training(model, make, **settings) as (optimizer, averager):
        for step in range(7):
            loss = backward(plain, step)
            alone.step()
            assert backward(model, step).item() == pytest.approx(loss.item(), rel=1e-5)
            optimizer.step()
            synchronized = (step + 1) % 3 == 0
            if synchronized or not overlap:
                assert averager.result.version == step
                assert averager.result.synchronized == synchronized
                assert averager.results[-1] is averager.result
    assert_equal_states(state(model), state(plain))


def inside(optimizer):
    """Return the names of what an optimizer has, and its hooks."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return set(vars(optimizer)), [dict(each) for each in hooks]


def test_the_optimizer_stays_the_users_and_nothing_is_left_in_it():
    """Its class, step, state and groups are its own; of a copy no averager hears."""
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    before, step = inside(optimizer), optimizer.step
    for _ in range(3):
        with WAGMA(model, optimizer, comm=MPI.COMM_SELF) as averager:
            assert isinstance(optimizer, torch.optim.Adam)
            assert averager.optimizers.given == (optimizer,)
            assert optimizer.step.__name__ == "step" and optimizer.step.__doc__ == step.__doc__
            backward(model)
            optimizer.step()
            assert len(optimizer.state) == 6 and averager.steps == 1
            saved = copy.deepcopy(optimizer.state_dict())
            assert saved.keys() == {"state", "param_groups"}
            copy.deepcopy(optimizer).step()
            assert averager.steps == 1
            optimizer.load_state_dict(saved)
        assert inside(optimizer) == before and optimizer.step == step
    optimizer.step()
    assert averager.steps == 1


def test_steps_by_a_method_that_was_kept_from_before_are_heard():
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = optimizer.step
    with WAGMA(model, optimizer, comm=MPI.COMM_SELF) as averager:
        backward(model)
        step()
        step(lambda: backward(model))
        assert averager.steps == averager.collective.version == 2
    step()
    assert averager.steps == 2


def test_steps_without_an_optimizer():
    plain, model = make_model(), make_model()
    alone, own = OPTIMIZERS["adam"](plain.parameters()), OPTIMIZERS["adam"](model.parameters())
    with WAGMA(model, comm=MPI.COMM_SELF, late="paper") as averager:
        for step in range(3):
            for network, either in ((plain, alone), (model, own)):
                backward(network, step)
                either.step()
            averager.step(weight=2)
        assert averager.steps == 3 and averager.result.weight == 2
    assert_equal_states(state(model), state(plain))


def test_gradients_are_averaged_without_an_optimizer():
    plain, model = make_model(), make_model()
    alone, own = OPTIMIZERS["adam"](plain.parameters()), OPTIMIZERS["adam"](model.parameters())
    with Allreduce(model, comm=MPI.COMM_SELF) as averager:
        with pytest.raises(RuntimeError, match=r"step\(\) without average_gradients\(\)"):
            averager.step()
        for step in range(3):
            for network, either in ((plain, alone), (model, own)):
                backward(network, step)
                if network is model:
                    assert averager.average_gradients()
                either.step()
            averager.step()
        assert averager.steps == 3
        backward(model)
        model[0].weight.grad.fill_(torch.nan)
        assert not averager.average_gradients()
        averager.step()
    assert_equal_states(model.parameters(), plain.parameters())
    refused = pytest.raises(RuntimeError, match=r"WAGMA averages models: call step\(\) only")
    with beside(model) as averager, refused:
        averager.average_gradients()


def test_a_step_by_hand_beside_an_optimizers_step_is_refused():
    with training(make_model()) as (optimizer, averager):
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"step\(\) is for training without an optimizer's"):
            averager.step()


@pytest.mark.parametrize("kind", [WAGMA, Allreduce])
def test_several_optimizers_make_one_step(kind):
    plain, model = make_model(), make_model()

    def make(network):
        first = torch.optim.SGD(network[0].parameters(), lr=0.1, momentum=0.9)
        return [first, OPTIMIZERS["adam"]([*network[2].parameters(), *network[3].parameters()])]

    alone, own = make(plain), make(model)
    with kind(model, own, comm=MPI.COMM_SELF) as averager:
        assert averager.optimizers.given == tuple(own)
        for step in range(4):
            for network, optimizers in ((plain, alone), (model, own)):
                backward(network, step)
                for each in optimizers[:: 1 if step % 2 else -1]:
                    each.step()
            assert averager.steps == averager.collective.version == step + 1
    assert_equal_states(state(model), state(plain))


def test_training_of_which_the_averager_has_heard_nothing_is_an_error():
    model = make_model()
    strange = OPTIMIZERS["sgd"](model.parameters())
    averager = beside(model)
    backward(model)
    averager.synchronize()  # no update yet
    strange.step()

    def join():
        with averager.join():
            pass

    calls = averager.synchronize, averager.averaged().__enter__, join, averager.state_dict
    for call in (*calls, averager.statistics, lambda: averager.result, averager.close):
        with pytest.raises(RuntimeError, match="has heard of no step of SGD: call averager.step"):
            call()
    with pytest.raises(collectives.ClosedError):
        averager.synchronize()


@pytest.mark.parametrize(
    "make",
    [
        *OPTIMIZERS.values(),
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
        torch.optim.NAdam,
    ],
    ids=[*OPTIMIZERS, "adagrad", "nadam"],
)
def test_state_that_an_update_has_spoilt_is_put_back(make, caplog):
    plain, model = make_model(), make_model()
    alone = make(plain.parameters())
    with training(model, make, late="conserving") as (optimizer, _):

        def closure(network, step, spoil):
            loss = backward(network, step)
            for parameter in network.parameters():
                parameter.grad.mul_(torch.nan if spoil else 1)
            return loss * (torch.nan if spoil else 1)

        optimizer.step(lambda: closure(model, 0, spoil=False))
        plain.load_state_dict(model.state_dict())
        alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step(lambda: closure(model, 1, spoil=True))
        assert_equal_states(model.parameters(), plain.parameters())
        for step in (2, 3):
            optimizer.step(lambda step=step: closure(model, step, spoil=False))
            alone.step(lambda step=step: closure(plain, step, spoil=False))
    assert_equal_states(model.parameters(), plain.parameters())
    [said] = caplog.messages
    assert said.startswith(
        "rank 0, step 1: an update that is not finite (the gradient of '0.weight"
    )


def test_hooks_run_once_a_step():
    model, calls = make_model(), []

    def note(name):
        return lambda *_: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        with training(model) as (optimizer, _):
            optimizer.register_step_pre_hook(note("pre"))
            optimizer.register_step_post_hook(note("post"))
            backward(model)
            optimizer.step()
            optimizer.register_state_dict_pre_hook(note("state"))
            optimizer.state_dict()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post", "global post", "state"]


def test_a_copy_is_refused():
    with beside(make_model()) as averager:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="WAGMA cannot be copied or pickled"):
                make(averager)


def test_a_model_and_an_optimizer_have_one_averager_at_a_time():
    model = make_model()
    inner = OPTIMIZERS["sgd"](model.parameters())
    with WAGMA(model, inner, comm=MPI.COMM_SELF):
        for part in (model, nn.Sequential(nn.Linear(4, 4), model)):
            with pytest.raises(ValueError, match=r"parameter '.*0\.weight' belongs to another WAG"):
                beside(part)
        inner.param_groups[0]["params"] = []
        with pytest.raises(ValueError, match="SGD belongs to another WAGMA averager"):
            WAGMA(make_model(), inner, comm=MPI.COMM_SELF)
    with training(model) as (optimizer, _):
        backward(model)
        optimizer.step()


def test_an_optimizer_that_is_itself_around_another_one():
    class Outer(torch.optim.Optimizer):
        def __init__(self, base):
            self.base, self.defaults, self.state = base, {}, {}
            self.param_groups = base.param_groups

        def step(self):  # no closure
            self.base.step()

    model = make_model()
    with training(model, lambda p: Outer(torch.optim.SGD(p, lr=0.1))) as (optimizer, _):
        before = model[0].weight.detach().clone()
        backward(model)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


def test_the_communicator_must_be_one():
    with pytest.raises(TypeError, match="comm is of type str, not an mpi4py intracommunicator"):
        WAGMA(make_model(), comm="world")


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
    with training(model) as (_, averager):
        backward(model)
        before = state(model)
        with pytest.raises(kind, match=message):
            averager.weight = weight
        with pytest.raises(kind, match=message):
            averager.step(weight=weight)
        assert averager.weight == 1 and averager.collective.version == 0
        assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def test_a_weight_reaches_the_collective_by_every_way_of_stepping():
    model, calls = make_model(), []
    with training(model) as (optimizer, averager):
        averager.collective = Recorder(averager.collective, calls)
        backward(model)
        optimizer.step()
        averager.weight = 2
        optimizer.step(lambda: backward(model))
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        averager.weight = 0.5
        optimizer.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        averager.weight = 0
        scaler.step(optimizer)
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
@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
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
def test_schedulers_are_made_before_or_after_the_averager(make, earlier):
    plain, model = make_model(), make_model()
    alone, optimizer = (OPTIMIZERS["sgd"](each.parameters()) for each in (plain, model))
    expected = make(alone)
    scheduler = make(optimizer) if earlier else None
    with WAGMA(model, optimizer, comm=MPI.COMM_SELF) as averager:
        scheduler = scheduler or make(optimizer)
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
        assert averager.steps == 5
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
    with training(model, make, late="paper") as (optimizer, averager):
        scaler = torch.amp.GradScaler(**settings)
        scales = train_scaled(model, optimizer, scaler, clip, overflows)
        assert averager.collective.version == 5
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    assert scales == expected and len(set(scales)) > 1
    assert_equal_states(state(model), state(plain))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_step_that_grad_scaler_skips_is_a_version_that_changes_nothing(clip):
    model = make_model()
    with training(model, OPTIMIZERS["adam"], late="paper") as (optimizer, averager):
        before = [value.clone() for value in model.parameters()]
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
        scaler = torch.amp.GradScaler("cpu")
        train_scaled(model, optimizer, scaler, clip, overflows=range(5))
        assert averager.collective.version == 5
        assert not calls and not optimizer.state
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_allreduce_goes_on_after_an_overflow_in_parameters_that_no_group_has():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with Allreduce(model, head, comm=MPI.COMM_SELF) as averager:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(3):
            before = model[1].weight.detach().clone()
            model.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            scaler.scale(loss * (torch.inf if step == 0 else 1)).backward()
            scaler.step(head)
            scaler.update()
            assert averager.result.weight == (step > 0)
            assert torch.equal(model[1].weight, before) == (step == 0)


def test_grad_scaler_still_refuses_what_it_refuses():
    model = make_model()
    with training(model) as (optimizer, averager):
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(AssertionError, match="did not use scaler.scale"):
            scaler.step(optimizer)
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="unscale_.. has already been called"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="GradScaler does not support closures"):
            scaler.step(optimizer, lambda: backward(model))
        assert averager.collective.version == 0
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called since the last update"):
            scaler.step(optimizer)
        assert averager.collective.version == 1


def test_a_disabled_grad_scaler_does_nothing():
    plain, model = make_model(), make_model()
    train_scaled(plain, OPTIMIZERS["sgd"](plain.parameters()), torch.amp.GradScaler("cpu"), True)
    with training(model) as (optimizer, _):
        train_scaled(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), clip=True)
    assert_equal_states(state(model), state(plain))


class Often(torch.optim.SGD):
    """Evaluates a closure several times."""

    def step(self, closure):
        losses = [super(Often, self).step(closure) for _ in range(3)]
        return losses[0]


def test_a_closure_evaluates_and_its_loss_is_returned():
    model, calls = make_model(), []

    def closure():
        calls.append(1)
        return backward(model)

    with training(model, lambda p: Often(p, lr=0.1)) as (optimizer, averager):
        first = optimizer.step(closure).item()
        assert len(calls) == 3
        assert optimizer.step(closure=closure).item() < first
        assert averager.collective.version == averager.steps == 2
        with pytest.raises(TypeError, match="closure"):
            optimizer.step()
    with training(make_model()) as (optimizer, _):
        assert optimizer.step(lambda: 3) == 3
        assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_several_backward_passes(set_to_none):
    plain, model = make_model(), make_model()
    alone = OPTIMIZERS["adam"](plain.parameters())
    with training(model, OPTIMIZERS["adam"]) as (optimizer, _):
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
    optimizer = make(model)
    with WAGMA(model, optimizer, comm=MPI.COMM_SELF):
        for network, either in ((plain, alone), (model, optimizer)):
            for step in range(3):
                backward(network, step)
                either.step()
                either.param_groups[1]["lr"] /= 2
                either.param_groups[0]["weight_decay"] = 0.1
    assert_equal_states(state(model), state(plain))


def test_parameters_without_a_gradient_stay():
    model = make_model()
    with training(model) as (optimizer, averager):
        model[3].weight.requires_grad_(False)
        before = state(model[3])
        for _ in range(2):
            backward(model)
            model[3].bias.grad = None
            optimizer.step()
        assert torch.equal(model[3].weight, before[0]) and torch.equal(model[3].bias, before[1])
        optimizer.zero_grad()
        optimizer.step()
        assert averager.collective.version == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    ("when", "overlap"),
    [("before", True), ("after", False), ("step", False), ("step", True), ("step-before", False)],
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
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if when == "step-before":
        optimizer.step = compiled(optimizer.step)
    settings = {"late": "paper", "overlap": overlap, "comm": MPI.COMM_SELF}
    with WAGMA(model, optimizer, **settings) as averager:
        step = optimizer.step
        if when == "after":
            network = compiled(model)
        elif when == "step":
            step = compiled(optimizer.step)
        for number in range(3):
            for one, take in ((plain, alone.step), (network, step)):
                one.zero_grad()
                batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
                one(batch).square().mean().backward()
                take()
        averager.complete()
        assert averager.collective.version == 3
    assert_equal_states(state(model), state(plain))


def test_a_graph_from_before_an_overlapped_average_cannot_be_differentiated_after_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with training(model, overlap=True) as (optimizer, averager):
        optimizer.step()
        loss = model(torch.ones(2)).sum()
        averager.complete()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_from_before_an_average_cannot_be_differentiated_with_the_new_values():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with training(model) as (optimizer, averager):
        for change in (averager.synchronize, optimizer.step):  # a step without a gradient
            loss = model(torch.ones(2)).sum()
            change()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
        loss = model(torch.ones(2)).sum()
        with averager.averaged():
            pass
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_making_and_evaluating_without_gradients_leave_a_model_that_trains(mode):
    model = make_model()
    with mode():
        averager = beside(model, OPTIMIZERS["adam"])
    with opened(averager) as (optimizer, _):
        with mode(), averager.averaged():
            model(torch.ones(2, 4))
        backward(model)
        optimizer.step()


def test_parameters_that_join_a_group_are_averaged_after_a_refresh():
    model, other = make_model(), nn.Linear(2, 2)
    model[0].requires_grad_(False)
    head = torch.optim.SGD(model[3].parameters(), lr=0.1)
    with WAGMA(model, head, comm=MPI.COMM_SELF) as averager:
        backward(model)
        head.step()
        model[0].requires_grad_(True)
        head.add_param_group({"params": model[0].parameters(), "lr": 0.5})
        before = state(model)
        backward(model)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"of group 1, shape \(8, 4\), is not averaged: it w"
            ):
                head.step()
        averager.refresh()
        assert_equal_states(state(model)[:2], before[:2])
        assert averager.steps == averager.collective.version == 1
        head.step()
        assert not torch.equal(model[0].weight, before[0])
        head.add_param_group({"params": other.parameters()})
        with pytest.raises(
            ValueError, match=r"parameter 0 of group 2, shape \(2, 2\), is not aver"
        ):
            head.step()
        del head.param_groups[2]
        head.step()
        assert averager.statistics().calls == 3


def test_a_parameter_that_is_frozen_or_unfrozen_later():
    """What was frozen when the averager was made is not averaged until a refresh."""
    plain, model = make_model(), make_model()
    alone = OPTIMIZERS["adam"](plain.parameters())
    for network in (plain, model):
        network[0].requires_grad_(False)
    with training(model, OPTIMIZERS["adam"]) as (optimizer, averager):
        for network, either in ((plain, alone), (model, optimizer)):
            for step in range(6):
                network[0].requires_grad_(step in (2, 3))
                if network is model and step == 2:
                    with pytest.raises(ValueError, match=r"was frozen when the .*: call refresh"):
                        either.step()
                    averager.refresh()
                backward(network, step)
                either.step()
    assert_equal_states(state(model), state(plain))


def test_synchronize_and_averaged_alone_keep_the_model_bit_for_bit():
    model = make_model()
    with training(model) as (optimizer, averager):
        backward(model)
        optimizer.step()
        before = state(model)
        averager.synchronize()
        with averager.averaged():
            assert_equal_states(state(model), before)
        for one, other in zip(state(model), before, strict=True):
            assert torch.equal(one, other)
        assert averager.collective.version == 1


def test_a_body_of_averaged_that_raises_or_spoils_the_model_leaves_it_as_it_was():
    model = make_model()
    with training(model) as (optimizer, averager):
        before = state(model)

        @averager.averaged()
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
    with training(model) as (optimizer, averager):
        for batches in range(1, 4):
            backward(model)
            optimizer.step()
            seen, mask = model.seen, model.mask
            with averager.averaged(), mode():
                model(torch.randn(5, 4))
                model.seen += 1
                assert model.seen == batches + 2 and len(model.mask) == 5
            assert model.seen is seen and model.mask is mask
            assert model.seen == batches and len(model.mask) == 16
        with mode():
            model(torch.randn(5, 4))
            with averager.averaged():
                model(torch.randn(7, 4))
        assert model.seen == 4 and len(model.mask) == 5


def test_training_inside_averaged_is_refused():
    model = make_model()
    with training(model) as (optimizer, averager):
        with averager.averaged():
            for call in (optimizer.step, averager.synchronize, averager.averaged().__enter__):
                with pytest.raises(RuntimeError, match="inside averaged"):
                    call()
        backward(model)
        optimizer.step()


def test_a_closed_one_refuses_and_leaves_the_model_and_the_optimizer_usable():
    model = make_model()
    averager = beside(model)
    averager.close()
    averager.close()
    assert averager.collective.closed
    before = state(model)
    backward(model)
    for call in (averager.step, averager.synchronize, averager.averaged().__enter__):
        with pytest.raises(collectives.ClosedError):
            call()
    assert torch.equal(model[0].weight, before[0])
    averager.optimizers.given[0].step()
    assert not torch.equal(model[0].weight, before[0])


def test_leaving_by_an_exception_closes():
    with pytest.raises(KeyError), beside(make_model()) as averager:
        raise KeyError
    assert averager.collective.closed


def test_replaced_memory_raises_instead_of_averaging_the_wrong_memory():
    model = make_model()
    with training(model) as (optimizer, averager):
        model.double()
        for call in (optimizer.step, averager.synchronize, averager.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was replaced"):
                call()


def test_what_cannot_be_averaged_raises_before_the_first_step():
    model = make_model()
    model.eighth = nn.Parameter(torch.zeros(3).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match="parameter 'eighth' is torch.float8_e5m2"):
        beside(model)


def test_the_former_order_of_arguments_is_refused_with_the_present_one():
    model = make_model()
    with pytest.raises(TypeError, match=r"is now averager = WAGMA\(model, optimizer\)"):
        WAGMA(OPTIMIZERS["sgd"](model.parameters()), model, comm=MPI.COMM_SELF)


def test_importing_does_not_initialize_mpi():
    code = "import sys, wagma.optim; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
