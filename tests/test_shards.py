"""Optimizer state as vectors, and control variates: one rank's, and simulated ranks'."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from methods import backward, bits, bits_of, make_model
from torch import nn

from wagma.optim import ADPSGD, WAGMA, LocalSGD
from wagma.optim.control_variates import ControlVariates
from wagma.optim.flat import FlatModel
from wagma.optim.local_state import LocalState, StateLayout
from wagma.optim.optimizers import Optimizers
from wagma.optim.tensors import survey
from wagma.simulation import MACHINES
from wagma.simulation.ranks import Job, Ranks

BOTH = {"average_state": True, "correction": "control-variates"}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
MOMENTS = {"adam", "amsgrad", "adamw", "fused-adamw", "adamax", "radam"}


class Counting(torch.optim.Optimizer):
    """Keeps a Python number and a tensor that every step replaces, as some optimizers do."""

    def __init__(self, params, whole=True):
        super().__init__(params, {"lr": 0.1})
        self.whole = whole

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                count = state.get("count", 0 if self.whole else 0.0)
                momentum = state.get("momentum", torch.zeros_like(parameter))
                state.update(count=count + 1, momentum=0.5 * momentum + parameter.grad)
                parameter.sub_(state["momentum"], alpha=group["lr"])


class Often(torch.optim.SGD):
    """Requires a closure."""

    def step(self, closure):
        return super().step(closure)


class Factored(torch.optim.Optimizer):
    """Keeps a matrix for each dimension, as Shampoo does."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["left"] = torch.eye(parameter.shape[0])


def flat_of(model):
    return FlatModel(model, survey(model, []))


def layout_of(optimizer):
    return StateLayout(Optimizers(optimizer))


def state_of(model, optimizer):
    """Return the state of a model's optimizer as vectors."""
    return LocalState(Optimizers(optimizer), flat_of(model), layout_of(optimizer))


def made(make, dtype=torch.float32):
    """Return a model, its optimizer, and the state of that as vectors."""
    model = make_model(0, dtype)
    optimizer = make(model.parameters())
    return model, optimizer, state_of(model, optimizer)


def variates_of(model, optimizer, **settings):
    settings = {"steps": 2, "by_moments": False, "replaced": False} | settings
    return ControlVariates(Optimizers(optimizer), flat_of(model), **settings)


def run(model, optimizer, steps, state=None, rank=0):
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        if state is not None:
            state.after_step()


@each_optimizer
def test_what_an_optimizer_keeps_is_known_before_its_first_step(make):
    model = make_model()
    optimizer = make(model.parameters())
    before = str(layout_of(optimizer))
    run(model, optimizer, range(1))
    assert str(layout_of(optimizer)) == before


@each_optimizer
def test_finding_it_out_changes_nothing(make):
    model, other = make_model(), make_model()
    optimizer, twin = make(model.parameters()), make(other.parameters())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    layout_of(optimizer)
    assert not called
    run(model, optimizer, range(3))
    run(other, twin, range(3))
    assert bits_of(model) == bits_of(other)


@each_optimizer
def test_steps_with_state_in_vectors_have_the_same_bits(make):
    model, optimizer, state = made(make)
    alone = make_model()
    local = make(alone.parameters())
    run(model, optimizer, range(5), state)
    run(alone, local, range(5))
    assert bits_of(model) == bits_of(alone)
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        for name, value in local.state[expected].items():
            if isinstance(value, torch.Tensor):
                mine = optimizer.state[parameter][name]
                assert mine is state._parts[parameter][name]
                assert torch.equal(mine, value)


@each_optimizer
def test_averaged_vectors_are_averaged_state(make):
    """Half the sum of two ranks' vectors is the state that both continue with."""
    one, two = made(make), made(make)
    run(one[0], one[1], range(3), one[2])
    run(two[0], two[1], range(5), two[2], rank=1)
    expected = copy.deepcopy(one[1].state_dict()["state"])
    for key, of in two[1].state_dict()["state"].items():
        for name, value in of.items():
            if isinstance(value, torch.Tensor):
                expected[key][name] = (expected[key][name] + value) / 2
    for mine, theirs in zip(one[2].memory, two[2].memory, strict=True):
        mine.add_(theirs).div_(2)
    one[2].changed(None)
    found = one[1].state_dict()["state"]
    for key, of in expected.items():
        for name, value in of.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[key][name], value), name


def test_bias_correction_is_that_of_the_averaged_count():
    """Adam's counts of 3 and 5 steps become 4, and its next step is the fifth."""
    model, optimizer, state = made(OPTIMIZERS["adam"])
    run(model, optimizer, range(3), state)
    numbers = state.memory[-1]
    assert numbers.unique().tolist() == [3]
    numbers.fill_(4)
    state.changed(None)
    run(model, optimizer, range(3, 4), state)
    assert {float(of["step"]) for of in optimizer.state.values()} == {5}


@pytest.mark.parametrize("whole", [True, False])
def test_state_that_is_replaced_and_python_numbers_are_averaged(whole):
    model, optimizer, state = made(lambda p: Counting(p, whole))
    run(model, optimizer, range(3), state)
    values = optimizer.state[next(model.parameters())]
    assert values["count"] == 3
    assert values["momentum"] is state._parts[next(model.parameters())]["momentum"]
    state.memory[-1].fill_(6.6)
    state.changed(None)
    assert values["count"] == (7 if whole else pytest.approx(6.6))
    assert type(values["count"]) is (int if whole else float)
    alone = make_model()
    run(alone, Counting(alone.parameters()), range(3))
    assert bits_of(model) == bits_of(alone)


def test_state_of_a_wider_dtype_has_a_vector_of_its_own():
    class Master(Counting):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["master"] = parameter.detach().float()

    model, optimizer, state = made(Master, torch.bfloat16)
    run(model, optimizer, range(1), state)
    assert [vector.dtype for vector in state.memory] == [torch.float32]
    first = next(model.parameters())
    assert torch.equal(optimizer.state[first]["master"], first.float())


def test_state_that_is_made_later_and_a_new_group_are_averaged():
    model = make_model()
    *others, last = model.parameters()
    optimizer = torch.optim.Adam(others, lr=0.01)
    state = state_of(model, optimizer)
    run(model, optimizer, range(2), state)
    assert last not in optimizer.state
    optimizer.add_param_group({"params": [last]})
    run(model, optimizer, range(2, 4), state)
    assert optimizer.state[last]["exp_avg"] is state._parts[last]["exp_avg"]
    assert float(optimizer.state[last]["step"]) == 2


def test_a_group_with_state_that_had_no_place_is_refused():
    model = make_model()
    *others, last = model.parameters()
    optimizer = torch.optim.SGD(others, lr=0.1)
    state = state_of(model, optimizer)
    optimizer.add_param_group({"params": [last], "momentum": 0.9})
    run(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match="SGD keeps 'momentum_buffer', which it did not"):
        state.after_step()


def test_a_loaded_state_is_moved_into_the_vectors():
    model, optimizer, state = made(OPTIMIZERS["adam"])
    run(model, optimizer, range(3), state)
    saved = copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, range(3, 5), state)
    optimizer.load_state_dict(saved)
    state.loaded(None)
    for index, parameter in enumerate(model.parameters()):
        for name, value in optimizer.state[parameter].items():
            assert value is state._parts[parameter][name]
            assert torch.equal(value, saved["state"][index][name])
    optimizer.load_state_dict(optimizer.state_dict())  # the same tensors
    state.loaded(None)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], saved["state"][index]["exp_avg"])


def test_a_saved_part_does_not_include_the_vector():
    model, optimizer, state = made(OPTIMIZERS["adam"])
    run(model, optimizer, range(1), state)
    for of in optimizer.state.values():
        for value in of.values():
            assert value.untyped_storage().nbytes() == value.nbytes


def test_released_state_has_memory_of_its_own():
    model, optimizer, state = made(OPTIMIZERS["adam"])
    run(model, optimizer, range(2), state)
    before = bits(value for of in optimizer.state.values() for value in of.values())
    vectors = state.memory
    state.release()
    for vector in vectors:
        vector.fill_(7)
    assert bits(value for of in optimizer.state.values() for value in of.values()) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Often, "Often keeps its state for all parameters together"),
        (torch.optim.Adafactor, r"Adafactor keeps 'row_var', torch.float32 of shape \(2, 1\)"),
        (Factored, r"Factored keeps 'left', torch.float32 of shape \(2, 2\), for a parameter of"),
    ],
)
def test_state_of_other_shapes_is_refused_by_name(make, message):
    with pytest.raises(TypeError, match=message):
        layout_of(make(make_model().parameters()))


def test_an_optimizer_whose_copy_cannot_make_a_step_is_refused():
    class Odd(Counting):
        def step(self):
            raise KeyError("seven")

    with pytest.raises(TypeError, match="cannot be found out, because a step of its copy raises"):
        layout_of(Odd(make_model().parameters()))


# Control variates


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_moments_are_corrected_and_second_moments_are_not(name):
    """A step by moments is Adam's with g + c − cr in the first moment; else it has that one."""
    model, optimizer, state = made(OPTIMIZERS[name], torch.float64)
    variates = variates_of(model, optimizer, steps=100, by_moments=True)
    run(model, optimizer, range(3), state)
    generator = torch.Generator().manual_seed(5)
    for vectors in (variates.mean, variates.own):
        for part in vectors.parts.values():
            part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    twin, other, _ = made(OPTIMIZERS[name], torch.float64)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward(model, 0, 3)
    backward(twin, 0, 3)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    raw = [p.grad.clone() for p in twin.parameters()]
    shifts = [variates.mean.parts[p] - variates.own.parts[p] for p, _ in pairs]
    variates.before_step(optimizer)
    for parameter, gradient in zip(model.parameters(), raw, strict=True):
        assert torch.equal(variates._sum.parts[parameter], gradient)
    optimizer.step()
    for (_, parameter), shift in zip(pairs, shifts, strict=True):
        parameter.grad.add_(shift)
    before = {p: dict(copy.deepcopy(other.state.get(p, {}))) for p in twin.parameters()}
    other.step()
    for (mine, theirs), gradient in zip(pairs, raw, strict=True):
        if name not in MOMENTS:
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
            continue
        moments = optimizer.state[mine], other.state[theirs]
        torch.testing.assert_close(moments[0]["exp_avg"], moments[1]["exp_avg"])
        if "exp_avg_sq" in moments[0]:
            square = 0.999 * before[theirs]["exp_avg_sq"] + 0.001 * gradient**2
            torch.testing.assert_close(moments[0]["exp_avg_sq"], square)


def corrected(name, change=lambda optimizer: None, sign=1):
    """Return a model after four corrected steps, where gradients and variates have this sign."""
    model, optimizer, state = made(OPTIMIZERS[name], torch.float64)
    change(optimizer)
    variates = variates_of(model, optimizer, steps=100, by_moments=True)
    generator = torch.Generator().manual_seed(5)
    for vectors in (variates.mean, variates.own):
        for part in vectors.parts.values():
            part.copy_(sign * torch.randn(part.shape, generator=generator, dtype=torch.float64))
    for step in range(4):
        backward(model, 0, step)
        for parameter in model.parameters():
            parameter.grad.mul_(sign)
        variates.before_step(optimizer)
        optimizer.step()
        state.after_step()
    return model, variates


@pytest.mark.parametrize("name", sorted(MOMENTS))
def test_who_maximizes_the_negated_loss_takes_the_same_corrected_steps(name):
    def maximize(optimizer):
        optimizer.param_groups[0]["maximize"] = True

    expected, _ = corrected(name)
    model, _ = corrected(name, maximize, sign=-1)
    assert bits(model.parameters()) == bits(expected.parameters())


def test_without_moments_gradients_are_corrected():
    """β₁ is 0 in one of two groups, or becomes that."""

    def change(optimizer):
        (group,) = optimizer.param_groups
        last = group["params"].pop()
        optimizer.add_param_group({"params": [last], "betas": (0.0, 0.99)})

    model, variates = corrected("adam", change)
    *_, first, last = model.parameters()
    shift = variates.mean.parts[last] - variates.own.parts[last]
    backward(model, 0, 4)
    expected = [each.grad.clone() for each in (first, last)]
    variates.before_step(variates.optimizers.given[0])
    torch.testing.assert_close(last.grad, expected[1] + shift)
    assert torch.equal(first.grad, expected[0])


def test_parameters_that_the_optimizer_does_not_have_have_no_variates():
    model = make_model()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    variates = variates_of(model, optimizer)
    for step in range(2):
        backward(model, 0, step)
        model[0].weight.grad.fill_(torch.nan)
        variates.before_step(optimizer)
        optimizer.step()
        variates.after_step()
    assert not variates.own.parts[model[0].weight].any()
    assert variates.own.parts[model[3].weight].all()


def test_without_averaged_state_adams_gradient_is_corrected():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    variates = variates_of(model, optimizer)
    variates.mean.memory[0].fill_(0.25)
    backward(model, 0, 0)
    before = next(model.parameters()).grad.clone()
    variates.before_step(optimizer)
    assert torch.equal(next(model.parameters()).grad, before + 0.25)


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    variates = variates_of(model, optimizer)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"'0.weight' has a gradient that is torch.sparse"):
        variates.before_step(optimizer)


# Quadratics: rank r has ½ a_r (x − b_r)², and the optimum of the sum is Σ a b / Σ a.

CURVATURES, OPTIMA = np.array([1.0, 2.0, 3.0, 8.0]), np.array([4.0, -1.0, 2.0, -3.0])
OPTIMUM = float((CURVATURES * OPTIMA).sum() / CURVATURES.sum())
RATE, PERIOD = 0.05, 5


class Point(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.curvature, self.optimum = CURVATURES[rank], OPTIMA[rank]

    def forward(self):
        return 0.5 * self.curvature * (self.place - self.optimum).square().sum()


def minimize(comm, kind, steps, *, seen=None, momentum=0.0, **options):
    """Make steps on a simulated rank; return where it ends, once all have.

    Args:
        seen: list that receives where it is before each step.
    """
    model = Point(comm.rank)
    local = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    with kind(model, local, comm=comm, **options) as averager:
        for _ in range(steps):
            if seen is not None:
                seen.append(model.place.item())
            comm.ranks.compute(comm.rank)
            local.zero_grad()
            model().backward()
            local.step()
        with averager.averaged():
            return model.place.item()


def descend(kind, steps, slow=1.0, momentum=0.0, **options):
    """Minimize on four simulated ranks, rank 3 slower than the others; return where each ends.

    All end at about the same time.
    """
    made = [steps if rank < 3 else int(steps / slow) for rank in range(4)]

    times = np.random.default_rng(1).uniform(0.8, 1.2, (steps + 1, 4))
    for rank, count in enumerate(made):
        times[:, rank] *= steps / times[:count, rank].sum()
    return Ranks(Job(MACHINES["hdr"], times)).run(
        lambda comm: minimize(comm, kind, made[comm.rank], momentum=momentum, **options)
    )


def test_local_sgd_ends_at_a_biased_point_and_corrected_at_the_optimum():
    """τ local steps leave b + (1 − ηa)^τ (x − b) of x, whose mean has another fixed point."""
    shrink = 1 - (1 - RATE * CURVATURES) ** PERIOD
    biased = float((shrink * OPTIMA).sum() / shrink.sum())
    assert abs(biased - OPTIMUM) > 0.3
    for place in descend(LocalSGD, 400, sync_period=PERIOD):
        assert place == pytest.approx(biased, abs=1e-9)
    for place in descend(LocalSGD, 1000, sync_period=PERIOD, correction="control-variates"):
        assert place == pytest.approx(OPTIMUM, abs=1e-6)


def stationary(period, size=2):
    """Return where WAGMA's ranks end whose steps wait for their group: a linear iteration's end."""
    from collectives.topology import group_of

    x = np.zeros(4)
    for t in range(400 * period):
        x = x - RATE * CURVATURES * (x - OPTIMA)
        last = (t + 1) % period == 0
        groups = [range(4) if last else group_of(r, 4, size, t) for r in range(4)]
        x = np.array([x[list(group)].mean() for group in groups])
    return x[0]


def test_wagmas_groups_are_biased_and_corrected_they_are_not():
    options = {"group_size": 2, "sync_period": PERIOD}
    biased = stationary(PERIOD)
    assert abs(biased - OPTIMUM) > 0.05
    for place in descend(WAGMA, 400, wait="group", **options):
        assert place == pytest.approx(biased, abs=1e-9)
    for wait in ("group", "nobody"):
        places = descend(WAGMA, 1500, wait=wait, correction="control-variates", **options)
        assert places == pytest.approx([OPTIMUM] * 4, abs=1e-6), wait


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "momentum", [pytest.param(0.0, marks=[pytest.mark.extra, pytest.mark.long]), 0.5]
)
def test_at_own_pace_with_a_straggler_the_corrected_optimum_is_exact(momentum):
    """A rank that makes a quarter of the steps counts for less; corrected, it counts in full."""
    options = {"group_size": 2, "sync_period": PERIOD, "pace": "own", "momentum": momentum}
    biased = descend(WAGMA, 1000, slow=4.0, **options)
    assert abs(np.mean(biased) - OPTIMUM) > 0.05
    corrected = descend(WAGMA, 3000, slow=4.0, **options, **BOTH)
    assert corrected == pytest.approx([OPTIMUM] * 4, abs=1e-5)


@pytest.mark.extra
@pytest.mark.long
def test_pairs_corrected_are_near_the_optimum():
    biased = descend(ADPSGD, 2000, slow=4.0)
    corrected = descend(ADPSGD, 8000, slow=4.0, **BOTH)
    assert min(abs(place - OPTIMUM) for place in biased) > 0.5
    assert corrected == pytest.approx([OPTIMUM] * 4, abs=1e-5)


def test_what_a_stopped_rank_has_put_in_expires_until_it_returns():
    """The others find the optimum of their own sum meanwhile, and with it that of all."""
    steps, stop = 3000, 100
    times = np.random.default_rng(2).uniform(0.8, 1.2, (steps, 4))
    times[stop, 3] = 1500.0  # its gradient there pulls elsewhere
    rest = float((CURVATURES * OPTIMA)[:3].sum() / CURVATURES[:3].sum())
    options = {"group_size": 2, "sync_period": PERIOD, "pace": "own"}
    seen = []

    def live(comm):
        count, places = (steps, seen) if comm.rank == 0 else (steps - 1500 * (comm.rank == 3), None)
        return minimize(comm, WAGMA, count, seen=places, correction="control-variates", **options)

    ends = Ranks(Job(MACHINES["hdr"], times)).run(live)
    assert seen[1400] == pytest.approx(rest, abs=1e-6)
    assert ends == pytest.approx([OPTIMUM] * 4, abs=1e-6)
