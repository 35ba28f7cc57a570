"""What every method does in one process, and what the registry of algorithms says of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import re
import typing
import weakref

import numpy as np
import pytest
import torch
from methods import METHODS as IN_TESTS
from methods import backward, bits_of, each_method, make_model, momentum_sgd
from mpi4py import MPI
from protocol_messages import protocols
from torch import nn

import collectives
from collectives.topology import group_of
from wagma import optim
from wagma.methods import DEFAULT, METHODS, REFERENCES, named
from wagma.methods.method import load
from wagma.optim import interfaces
from wagma.optim.averager import Averager, join_blocks
from wagma.simulation import FREE, Settings, simulate
from wagma.simulation.methods import simulated_options

ALONE = MPI.COMM_SELF


@each_method
def test_one_rank_trains_as_the_optimizer_alone(method):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = momentum_sgd(plain.parameters())
    with method.training(model, ALONE) as (optimizer, averager):
        for step in range(9):
            loss = backward(plain, 0, step)
            alone.step()
            own = optimizer.step(lambda step=step: backward(model, 0, step))
            torch.testing.assert_close(own, loss, rtol=method.rounding, atol=0)
        averager.complete()
        assert averager.result.version == (8 if method.in_step else 2)
        assert averager.results[-1] is averager.result
        assert averager.result.group == (0,) and averager.result.timely
    assert_equal(model, plain, method)


def assert_equal(model, plain, method):
    for one, other in zip(model.state_dict().values(), plain.state_dict().values()):
        torch.testing.assert_close(one, other, rtol=1e-6 + method.rounding, atol=1e-6)


@each_method
def test_a_model_and_an_optimizer_have_one_averager_and_are_free_after_closing(method):
    kind = method.kind.__name__
    model = make_model()
    averager = method.make(model, ALONE)
    [optimizer] = averager.optimizers.given
    backward(model, 0, 0)
    before = model[0].weight.detach().clone()
    for other in IN_TESTS.values():
        with pytest.raises(
            TypeError, match=rf"is now averager = {other.kind.__name__}\(model, opt"
        ):
            other.kind(optimizer, model, comm=ALONE, **other.settings)
        with pytest.raises(ValueError, match=f"'0.weight' belongs to another {kind} averager"):
            other.make(model, ALONE)
    with averager.averaged():
        for call in (optimizer.step, averager.synchronize, averager.averaged().__enter__):
            with pytest.raises(RuntimeError, match="inside averaged"):
                call()
    assert torch.equal(model[0].weight, before)
    averager.close()
    averager.close()
    for call in (averager.step, averager.synchronize, averager.averaged().__enter__):
        with pytest.raises(collectives.ClosedError, match=f"this {kind} averager is closed"):
            call()
    assert torch.equal(model[0].weight, before)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@each_method
def test_a_wrong_weight_and_a_replaced_parameter_are_refused(method):
    model = make_model()
    with method.training(model, ALONE) as (optimizer, averager):
        backward(model, 0, 0)
        with pytest.raises(ValueError, match="weight is -1"):
            averager.weight = -1
        with pytest.raises(TypeError, match="weight is a bool, not a number"):
            averager.weight = True
        if not averager._is_weighted:
            averager.weight = 2
            with pytest.raises(ValueError, match="weight is 2, but all ranks have the same"):
                optimizer.step()
            averager.weight = 1
        assert averager.collective.version == 0
        model.double()
        for call in (
            optimizer.step,
            averager.synchronize,
            averager.averaged().__enter__,
            averager.state_dict,
        ):
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was replaced"):
                call()


@each_method
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_making_saving_and_closing_in_any_mode_leave_a_model_that_trains(method, mode):
    model = make_model()
    with mode():
        averager = method.make(model, ALONE)
        state = copy.deepcopy(model.state_dict())
    [optimizer] = averager.optimizers.given
    for step in range(2):
        backward(model, 0, step)
        optimizer.step()
    averager.complete()
    model.load_state_dict(state)
    with mode():
        averager.close()
    backward(model, 0, 2)
    optimizer.step()


@each_method
def test_steps_that_grad_scaler_skips_count_and_change_nothing(method):
    model = make_model()
    with method.training(model, ALONE) as (optimizer, averager):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [value.detach().clone() for value in model.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum() * torch.inf).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1.0
        assert averager.collective.version == 2 * method.in_step and not optimizer.state
        averager.complete()
        for value, old in zip(model.parameters(), before):
            torch.testing.assert_close(value.detach(), old, rtol=0, atol=0)
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="GradScaler does not support closures"):
            scaler.step(optimizer, lambda: 1)


class Often(torch.optim.SGD):
    """Requires a closure."""

    def step(self, closure):
        closure()
        return super().step(closure)


def test_optimizers_that_call_a_closure_often_cannot_average_gradients():
    model = make_model()
    for kind in (optim.Allreduce, optim.EagerSGD):
        message = f"Often evaluates a closure several times .* {kind.__name__} could not average"
        with pytest.raises(TypeError, match=message):
            kind(model, Often(model.parameters()), comm=ALONE)


@each_method
def test_optimizers_that_are_none_and_those_of_curvature_are_refused(method):
    model, kind = make_model(), method.kind.__name__
    with pytest.raises(TypeError, match=f"LBFGS learns the curvature .*, which {kind} would chan"):
        method.make(model, ALONE, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, .* not str"):
        method.make(model, ALONE, lambda _: "sgd")


def test_sparse_gradients_are_refused_by_name():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with optim.Allreduce(model, optimizer, comm=ALONE):
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="parameter 'weight' has a gradient that is .*sparse"):
            optimizer.step()


def test_a_server_s_model_takes_a_nesterov_step_by_what_a_rank_changed_in_its_local_steps():
    model, plain = make_model(), make_model()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    # Torch's own outer step; buffers have no part in it, and are not compared.
    kept = [value.detach().clone().requires_grad_() for value in plain.parameters()]
    outer = torch.optim.SGD(kept, lr=0.8, momentum=0.5, nesterov=True)
    given = {"mode": "async-local", "local_steps": 3, "outer_momentum": 0.5, "outer_rate": 0.8}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.eval(), plain.eval()  # nothing depends on the buffers
    with optim.ParameterServer(model, sgd, comm=ALONE, **given) as averager:
        assert averager.settings["local_steps"] == 3
        for step in range(9):
            for network, either in ((plain, inner), (model, sgd)):
                backward(network, 0, step)
                either.step()
            if step % 3 == 2:
                for value, local in zip(kept, plain.parameters()):
                    value.grad = value.detach() - local.detach()
                outer.step()
                with torch.no_grad():
                    for value, local in zip(kept, plain.parameters()):
                        local.copy_(value)
            for one, other in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert averager.collective.version == 3 and averager.result.version == 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"mode": "asp", "local_steps": 2}, ValueError, "local_steps is 2, but mode is 'asp'"),
        ({"mode": "async-local", "local_steps": 0}, ValueError, "local_steps is 0, less than 1"),
        ({"mode": "async-local", "local_steps": "2"}, TypeError, "local_steps is '2', not an int"),
        ({"mode": "async-local", "local_steps": [2, 3]}, ValueError, "2 numbers, not one for each"),
        ({"dynamic_steps": True}, ValueError, "dynamic_steps is set, but mode is 'bsp'"),
        (
            {"mode": "async-local", "local_steps": [2], "dynamic_steps": True},
            ValueError,
            "a number for each rank, but dynamic_steps is set",
        ),
    ],
)
def test_local_steps_are_checked(given, error, message):
    model = make_model()
    with pytest.raises(error, match=message):
        optim.ParameterServer(model, momentum_sgd(model.parameters()), comm=ALONE, **given)


def test_a_speed_is_that_of_steps_without_what_is_between_them():
    model, now = make_model(), [0.0]
    given = {"mode": "async-local", "local_steps": 2, "dynamic_steps": True}
    sgd = momentum_sgd(model.parameters())
    with optim.ParameterServer(model, sgd, comm=ALONE, **given) as averager:
        averager._clock, averager._began = (lambda: now[0]), 0.0
        for step in range(6):
            backward(model, 0, step)
            now[0] += 0.25
            sgd.step()
            if step % 2:
                assert averager.collective.speed == 4
            with averager.averaged():
                now[0] += 100
            with join_blocks.enter():
                with averager.join():
                    pass
                now[0] += 100  # the others make more steps


# What users see


OURS = {
    *("average_gradients", "averaged", "averages_gradients", "close", "closed", "collective"),
    *("comm", "complete", "flat", "join", "load_state_dict", "optimizers", "record", "refresh"),
    *("result", "results", "settings", "state_dict", "statistics", "step", "steps", "synchronize"),
    *("timeline", "weight"),
}


@each_method
def test_the_public_names_are_a_users(method):
    own = {optim.LocalSGD: {"trigger"}}
    own |= {optim.WAGMA: {"checkpoint", "last_average", "overlap", "total_steps", "work"}}
    own[optim.Allreduce] = {"compute_limit", "computed", "left_out", "report", "within_limit"}
    own |= {
        kind: {"report"}
        for kind in (optim.Hop, optim.ParameterServer, optim.PartialReduce, optim.Ripples)
    }
    with method.make(make_model(), ALONE) as averager:
        names = {name for name in dir(averager) if name[0] != "_"}
        assert names == OURS | own.get(method.kind, set())


@each_method
def test_its_repr_says_what_it_is_in_a_line(method):
    model = make_model()
    with method.training(model, ALONE) as (optimizer, averager):
        backward(model, 0, 0)
        optimizer.step()
        settings = [f"{name}={value!r}" for name, value in averager.settings.items()]
        said = ", ".join(["SGD", "1 rank", *settings, "step 1"])
        assert repr(averager) == f"{method.kind.__name__}({said}, open)"
    assert repr(averager) == f"{method.kind.__name__}({said}, closed)"
    assert "momentum: 0.9" in repr(optimizer)


def public_classes():
    for package in (collectives, optim):
        for name in package.__all__:
            public = getattr(package, name)
            if typing.is_typeddict(public) or not isinstance(public, type):
                continue
            if not issubclass(public, BaseException):
                yield pytest.param(public, id=f"{package.__name__}.{name}")


@pytest.mark.parametrize("public", list(public_classes()))
def test_only_the_options_of_all_collectives_are_not_in_a_signature(public):
    parameters = inspect.signature(public).parameters.values()
    stars = [each for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
    declared = r"Unpack\[(collectives\.)?(Averager|Collective|Group)Options\]"
    assert all(re.fullmatch(declared, each.annotation) for each in stars)


# Saving


def saved_bytes(thing) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


def memory_of(tensor) -> int:
    return tensor.untyped_storage().nbytes()


@each_method
def test_a_part_of_the_model_is_saved_and_copied_without_the_rest(method):
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    averager = method.make(model, ALONE)
    parameters = list(model.parameters())
    for closed in (False, True):
        assert saved_bytes(model[2].state_dict()) < 10_000 < saved_bytes(model.state_dict())
        for part in (model, copy.deepcopy(model)):
            for value in part.state_dict().values():
                assert memory_of(value) == value.nbytes
        if not closed:
            averager.close()
    assert all(one is other for one, other in zip(model.parameters(), parameters))


@each_method
def test_a_closed_models_memory_is_its_own_and_training_goes_on_with_the_optimizer(method):
    plain = make_model()
    model = copy.deepcopy(plain)
    alone = momentum_sgd(plain.parameters())
    averager = method.make(model, ALONE)
    [optimizer] = averager.optimizers.given
    vector = averager.flat.vectors[0]
    for step in range(4):
        if step == 2:
            averager.close()
            assert not averager.flat.vectors
            vector[:] = np.nan
            averager.close()
            assert averager.state_dict()
        for network, either in ((plain, alone), (model, optimizer)):
            backward(network, 0, step)
            either.step()
    assert averager.steps == 2
    assert_equal(model, plain, method)


@each_method
@pytest.mark.parametrize("how", ["close", "exit", "error"])
def test_closing_inside_averaged_gives_the_rank_its_own_model_in_its_own_memory(method, how):
    model = make_model()
    averager = method.make(model, ALONE)
    averager.complete()
    before, vector = bits_of(model), averager.flat.vectors[0]
    with contextlib.suppress(KeyError), averager.averaged():
        with torch.no_grad():
            model[0].weight.fill_(7)
        if how == "close":
            averager.close()
        else:
            with averager:
                if how == "error":
                    raise KeyError
        assert (vector == 7).any()
    vector[:] = np.nan
    assert averager.closed and bits_of(model) == before


@each_method
def test_a_constructor_that_fails_leaves_the_model_and_the_optimizer_as_they_were(method):
    model = make_model()
    inner = momentum_sgd(model.parameters())
    backward(model, 0, 0)
    with pytest.raises(ValueError, match="engine .* is 'steam', not one of") as caught:
        method.kind(model, inner, comm=ALONE, **method.settings, engine="steam")
    inner.step()
    assert all(memory_of(value) == value.nbytes for value in model.state_dict().values())
    assert caught.tb is not None  # which holds what was made
    assert "step" not in vars(inner)
    with method.kind(model, inner, comm=ALONE, **method.settings):
        inner.step()


# Parts that are new to the model


def add_module(model):
    model.append(nn.Linear(3, 3))
    return "parameter '4.weight'"


def replace_module(model):
    model[3] = nn.Linear(8, 3)
    return "parameter '3.weight'"


def add_parameter(model):
    model[0].register_parameter("scale", nn.Parameter(torch.ones(())))
    return "parameter '0.scale'"


def add_lazy_module(model):
    model.append(nn.LazyBatchNorm1d(affine=False))
    return "buffer '4.running_mean'"


def add_statistics(model):
    model.register_buffer("seen", torch.zeros(3))
    return "buffer 'seen'"


@each_method
@pytest.mark.parametrize(
    "add", [add_module, replace_module, add_parameter, add_lazy_module, add_statistics]
)
def test_what_is_new_to_the_model_is_named_by_all_that_would_leave_it_out(method, add):
    model = make_model()
    with method.training(model, ALONE) as (_, averager):
        saved = averager.state_dict()
        joining = averager.join()
        joining.__enter__()
        named = add(model)
        message = f"{named} was added or unfrozen after the averager was made, .*: call refresh"
        for call in (
            averager.synchronize,
            averager.averaged().__enter__,
            averager.state_dict,
            lambda: averager.load_state_dict(saved),
            lambda: joining.__exit__(None, None, None),
        ):
            with pytest.raises(RuntimeError, match=message):
                call()
    assert averager.state_dict()["version"] == 0
    if add is not add_lazy_module:
        with method.make(model, ALONE) as averager:
            averager.synchronize()


@each_method
def test_constants_counters_and_caches_may_be_new_to_the_model(method):
    model = make_model()
    with method.training(model, ALONE) as (_, averager):
        model.encoder = nn.Linear(2, 2).requires_grad_(False)
        model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        model.register_buffer("cosines", torch.ones(3), persistent=False)
        model.head = model[3]  # under another name
        averager.synchronize()
        with averager.averaged():
            assert averager.state_dict()["equal"]
        assert averager.state_dict()


def test_a_closed_averager_is_freed_with_its_model():
    model = make_model()
    averager = optim.WAGMA(model, momentum_sgd(model.parameters()), comm=ALONE)
    averager.close()
    seen = [weakref.ref(thing) for thing in (model, averager, averager.flat)]
    gc.disable()
    try:
        del model, averager
        assert not any(thing() for thing in seen)
    finally:
        gc.enable()


# What is declared


def test_every_method_has_a_declaration_and_every_declaration_a_method():
    kinds = {load(method.averager) for method in METHODS.values()}
    assert kinds == {method.kind for method in IN_TESTS.values()}
    assert all(issubclass(kind, Averager) for kind in kinds)
    assert DEFAULT in METHODS and all(METHODS[name].name == name for name in METHODS)


@pytest.mark.parametrize("name", METHODS | REFERENCES)
def test_an_optimizer_has_the_options_that_are_declared(name):
    method = named(name)
    parameters = inspect.signature(load(method.averager).__init__).parameters
    passed_on = set()
    if "options" in parameters:  # those of all collectives
        passed_on = {"transport"}
        assert passed_on <= {option.name for option in method.options}
    for option in method.options:
        assert option.name in parameters or option.name in passed_on
        default = getattr(parameters.get(option.name), "default", None)
        assert default in (None, inspect.Parameter.empty, option.default)
    assert ("seed" in parameters) == method.seeded


@each_method
def test_optimizers_and_collectives_have_what_is_asked_of_them(method):
    with method.make(make_model(), ALONE) as averager:
        assert isinstance(averager, interfaces.Averager)
        assert isinstance(averager.collective, interfaces.Collective)


def test_simulations_have_the_defaults_of_options_that_are_the_same_in_all_methods():
    """Where they are not, each method has its own."""
    own = {"graph", "groups", "mode", "trigger"}
    settings = vars(Settings(8))
    for name, options in simulated_options().items():
        declared = {method.option(name) for method in METHODS.values()} - {None}
        assert {option for option in declared if option.simulated} == options
        assert settings[name] == (None if name in own else options.pop().default)
    for groups in ("fixed", "static"):
        assert Settings(8, groups=groups).groups == groups
    with pytest.raises(ValueError, match="groups must be changing or fixed, not 'best'; groups mu"):
        Settings(8, groups="best")
    for name, groups in (("wagma", "static"), ("ripples", "fixed")):
        with pytest.raises(ValueError, match=f"groups is '{groups}', not one of "):
            simulate(name, np.ones((2, 2)), FREE, Settings(8, groups=groups))


SECONDS = np.array([[1.0, 1.0, 5.0, 1.0, 1.0], [2.0, 3.0, 1.0, 2.0, 1.0]])
BOUNDS = {  # with periods of two steps
    "wagma": 5.0 + 6.0 + 1.0,
    "allreduce": 2.0 + 3.0 + 5.0 + 2.0 + 1.0,
    "local-sgd": 5.0 + 6.0 + 1.0,
    "d-psgd": 9.0,
    "sgp": 13.0,
    "ad-psgd": 9.0,
    "parameter-server": 13.0,
    "partial-reduce": 13.0,
    "ripples": 13.0,
    "hop": 9.0,
    "eager-sgd": 5.0 + 6.0 + 1.0,
    "ddp": 13.0,
    "post-local-sgd": 5.0 + 6.0 + 1.0,
}


@pytest.mark.parametrize("name", METHODS | REFERENCES)
def test_the_bound_is_of_who_waits_for_whom(name):
    chosen = {"sync_period": 2, "group_size": 1 if name == "wagma" else 2}
    bound = named(name).bound(SECONDS, chosen)
    assert isinstance(bound, float) and bound == BOUNDS[name]


def test_where_a_step_waits_for_its_group_the_bound_does_too():
    seconds = np.random.default_rng(4).uniform(1, 2, (4, 6))
    chosen = {"group_size": 2, "sync_period": 9}
    ended = np.zeros(4)
    for version, step in enumerate(seconds.T):
        called = ended + step
        ended = np.array([called[list(group_of(rank, 4, 2, version))].max() for rank in range(4)])
    assert METHODS["wagma"].bound(seconds, chosen | {"wait": "group"}) == pytest.approx(ended.max())
    assert METHODS["wagma"].bound(seconds, chosen | {"wait": "nobody"}) < ended.max()


def test_a_round_s_bound_does_without_its_backups():
    seconds = np.array([[1.0] * 4, [1.0] * 4, [2.5] * 4])
    chosen = {"mode": "backup", "backups": 1}
    assert METHODS["parameter-server"].bound(seconds, chosen) == 10.0
    assert METHODS["parameter-server"].bound(seconds[:2], chosen | {"backups": 0}) == 4.0


def test_with_majority_who_comes_first_waits_for_the_rank_that_is_drawn():
    seconds = np.array([[1.0, 9.0, 1.0], [4.0, 1.0, 1.0]])
    draws = [protocols.drawn(0, step, 2) for step in range(2)]
    expected = {(0, 0): 10 + 1.0, (0, 1): 10 + 1.0, (1, 0): 13 + 1.0, (1, 1): 13 + 1.0}
    chosen = {"sync_period": 3, "trigger": "majority"}
    assert METHODS["eager-sgd"].bound(seconds, chosen) == expected[tuple(draws)]
