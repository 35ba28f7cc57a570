"""WAGMA on several ranks: it averages what the paper says, and every rank agrees."""

from __future__ import annotations

import contextlib
import itertools
import time

import numpy as np
import pytest
import torch
from methods import (
    OPTIMIZERS,
    backward,
    floats,
    make_model,
    momentum_sgd,
    set_floats,
    train,
)
from together import RULES, before_transports, same_everywhere
from torch import nn

from collectives.topology import default_group_size, group_of
from wagma.optim import DPSGD, WAGMA, Allreduce, Ripples, allreduce, averaging, flat

# That training has the same bits with both transports is shown by test_bits.py.
pytestmark = [pytest.mark.mpi, pytest.mark.transports("shared")]


def train_reference(comm, steps, partners, make, dtype):
    """Train with MPI's collectives: after step t, average with the ranks `partners(t)`."""
    model = make_model(0, dtype)
    optimizer = make(model.parameters())
    for step in range(steps):
        backward(model, comm.rank, step)
        optimizer.step()
        models = comm.allgather(floats(model))
        set_floats(model, np.mean([models[rank] for rank in partners(step)], axis=0))
    return model


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_groups_of_all_ranks_equal_an_allreduce_of_the_model_every_step(comm, make, late):
    everyone = range(comm.size)
    expected = train_reference(comm, 6, lambda step: everyone, make, torch.float64)

    model = make_model(comm.rank, torch.float64)
    optimizer = make(model.parameters())
    settings = {"group_size": comm.size, "sync_period": 4, "wait": "group", "late": late}
    with WAGMA(model, optimizer, comm=comm, **settings) as averager:
        for step in range(6):
            backward(model, comm.rank, step)
            optimizer.step()
            assert averager.result.timely
            assert same_everywhere(comm, floats(model).tobytes())
    np.testing.assert_allclose(floats(model), floats(expected), rtol=1e-10, atol=1e-13)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
def test_each_step_averages_the_papers_group_and_every_tau_steps_all(comm, late):
    size, period = default_group_size(comm.size), 3

    def partners(step):
        if (step + 1) % period == 0:
            return range(comm.size)
        return group_of(comm.rank, comm.size, size, step)

    make = momentum_sgd
    expected = train_reference(comm, 8, partners, make, torch.float64)
    model = make_model(comm.rank, torch.float64)
    optimizer = make(model.parameters())
    settings = {"sync_period": period, "wait": "group", "late": late}
    with WAGMA(model, optimizer, comm=comm, **settings) as averager:
        assert averager.collective.group_size == size
        for step in range(8):
            backward(model, comm.rank, step)
            optimizer.step()
            assert averager.result.synchronized == ((step + 1) % period == 0)
            if not averager.result.synchronized:
                assert tuple(averager.result.group) == tuple(partners(step))
    np.testing.assert_allclose(floats(model), floats(expected), rtol=1e-10, atol=1e-13)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_ranks_agree_bit_for_bit_after_every_synchronization(comm, wait, late):
    random = np.random.default_rng(comm.rank)
    synchronized = []

    def observe(averager):
        time.sleep(random.uniform(0, 0.004) if comm.rank else 0.006)
        if averager.result.synchronized:
            synchronized.append(averager.flat.vectors[0].tobytes())
            assert averager.result.version == averager.collective.version - 1

    model = train(comm, 17, observe, sync_period=5, wait=wait, late=late)

    assert len(synchronized) == 3 and len(set(synchronized)) == 3
    assert same_everywhere(comm, tuple(synchronized))
    assert np.isfinite(floats(model)).all()


@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_synchronize_makes_all_models_equal_and_is_not_a_step(comm, wait, late):
    def synchronize(averager):
        version = averager.collective.version
        averager.synchronize()
        assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        assert averager.collective.version == version

    train(comm, 4, synchronize, wait=wait, late=late)


@pytest.mark.parametrize("late", RULES)
def test_batchnorm_statistics_are_averaged_and_its_counter_is_not(comm, late):
    model = make_model(comm.rank)
    with WAGMA(model, momentum_sgd(model.parameters()), comm=comm, late=late) as averager:
        for _ in range(comm.rank + 1):
            model(torch.randn(4, 4) + comm.rank)
        statistics = (model[2].running_mean, model[2].running_var)
        own = comm.allgather([value.numpy() for value in statistics])
        assert comm.size == 1 or not np.allclose(own[0][0], own[1][0])
        averager.synchronize()
        for value, expected in zip(statistics, np.mean(own, axis=0), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert model[2].num_batches_tracked == comm.rank + 1


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_averaged_holds_the_mean_of_all_models_and_restores_each_ones_own(comm, wait, late):
    random = np.random.default_rng(comm.rank)

    def evaluate(averager):
        time.sleep(random.uniform(0, 0.004) * comm.rank)
        own = averager.flat.vectors[0].copy()
        mean = np.mean(comm.allgather(own), axis=0, dtype=np.float64)
        with averager.averaged():
            np.testing.assert_allclose(averager.flat.vectors[0], mean, rtol=1e-5, atol=1e-7)
            assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        assert averager.flat.vectors[0].tobytes() == own.tobytes()

    train(comm, 9, evaluate, sync_period=4, wait=wait, late=late)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize(("overlap", "sync_period"), [(False, 8), (True, 8), (True, 100)])
def test_the_conserving_rule_has_every_ranks_every_update_in_the_average(
    comm, overlap, sync_period
):
    random = np.random.default_rng(comm.rank)
    model = nn.Linear(50, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"sync_period": sync_period, "late": "conserving", "overlap": overlap}
    with WAGMA(model, optimizer, comm=comm, **settings) as averager:
        start = model.weight.detach().clone()
        for step in range(1, 31):
            time.sleep(random.uniform(0, 0.003) * (1 + 4 * (comm.rank == 1)))
            optimizer.zero_grad()
            (model.weight.sum() * (comm.rank + 1)).backward()
            optimizer.step()
            if step % 7 == 0:
                done = 0.5 * step * (comm.size + 1) / 2
                with averager.averaged():
                    torch.testing.assert_close(model.weight.detach(), start - done)


@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize(("make", "overlap"), [("sgd", False), ("sgd", True), ("adam", False)])
def test_evaluating_does_not_disturb_training(comm, make, late, overlap):
    def evaluate(averager, model):
        with contextlib.suppress(KeyError), averager.averaged():
            for training in (False, True):  # in training, BatchNorm's statistics change
                model.train(training)
                model(torch.randn(3, 4))
            averager.flat.vectors[0] *= 2
            raise KeyError

    def train(each_step):
        model = make_model(comm.rank)
        inner = OPTIMIZERS[make](model.parameters())
        settings = {"sync_period": 4, "wait": "group", "late": late, "overlap": overlap}
        with WAGMA(model, inner, comm=comm, **settings) as averager:
            for step in range(10):
                backward(model, comm.rank, step)
                inner.step()
                each_step(averager, model)
        entries = [value for entry in inner.state.values() for value in entry.values()]
        return [value.numpy().tobytes() for value in [*model.state_dict().values(), *entries]]

    with_evaluation = train(evaluate)
    assert train(lambda *_: None) == with_evaluation
    assert len(with_evaluation) >= 9 + 6  # the model's tensors, and the optimizer's


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize(("name", "clip"), [("sgd", True), ("adam", False)])
def test_a_step_that_one_ranks_grad_scaler_skips_is_a_version_there_too(comm, name, clip, late):
    """Local steps are skipped, with all else as in an allreduce of the model every step."""
    make = OPTIMIZERS[name]
    odd = comm.size - 1

    def train(model, optimizer, average):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for step in range(7):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * comm.rank + step)
            loss = (model(torch.randn(16, 4, generator=generator)) - comm.rank).square().mean()
            if (comm.rank, step) in ((odd, 0), (odd, 4)):
                loss = loss * torch.nan
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            average()
            scaler.update()
            if step:  # torch warns of a scheduler that steps before an optimizer that skips
                scheduler.step()
        return scaler.get_scale()

    def allreduce():
        set_floats(expected, np.mean(comm.allgather(floats(expected)), axis=0))

    expected = make_model(0)
    scale = train(expected, make(expected.parameters()), allreduce)

    model = make_model(comm.rank)
    settings = {"group_size": comm.size, "sync_period": 4, "wait": "group", "late": late}
    optimizer = make(model.parameters())
    with WAGMA(model, optimizer, comm=comm, **settings) as averager:

        def check():
            assert same_everywhere(comm, averager.result.version)
            assert same_everywhere(comm, averager.flat.vectors[0].tobytes())

        assert train(model, optimizer, check) == scale == 2.0 ** (11 if comm.rank == odd else 14)
        assert averager.collective.version == 7
    np.testing.assert_allclose(floats(model), floats(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "settings",
    [
        {"late": "paper"},
        {"late": "conserving"},
        {"wait": "group"},
        {"overlap": True},
        {"pace": "own"},
        {"pace": "own", "overlap": True},
    ],
    ids=["paper", "conserving", "group", "overlap", "own", "own-overlap"],
)
def test_a_rank_takes_part_again_right_after_an_update_that_is_not_finite(
    comm, caplog, make, settings
):
    model = make_model(comm.rank)
    optimizer = make(model.parameters())
    settings = {"group_size": comm.size, "sync_period": 50, **settings}
    with WAGMA(model, optimizer, comm=comm, **settings) as averager:
        for step in range(12):
            backward(model, comm.rank, step)
            if comm.rank == 1 and step in (2, 7):
                for parameter in model.parameters():
                    parameter.grad.fill_(torch.nan)
            optimizer.step()
        averager.complete()
        spoilt = comm.rank == 1
        assert averager.collective.statistics().left_out == 2 * spoilt
        assert np.isfinite(floats(model)).all()
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    assert len(values) >= 6 and all(value.isfinite().all() for value in values)
    said = [text for text in caplog.messages if "an update" in text]
    assert len(said) == spoilt
    assert not spoilt or said[0].startswith("rank 1, step 2: an update that is not finite")


@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_parameters_that_have_no_gradient_on_some_ranks_are_averaged(comm, wait):
    model = nn.ModuleList([nn.Linear(3, 1) for _ in range(comm.size + 1)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with WAGMA(model, optimizer, comm=comm, sync_period=2, wait=wait) as averager:
        before = [part.weight.detach().clone() for part in model]
        for step in range(4):
            optimizer.zero_grad()
            if step or comm.rank:  # in the first step, one rank has no gradient at all
                model[comm.rank](torch.ones(3)).sum().backward()
            optimizer.step()
        assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        for part, value in list(zip(model, before, strict=True))[:-1]:
            assert not torch.equal(part.weight, value)
        assert len(optimizer.state) == 2
    torch.testing.assert_close(model[comm.size].weight.detach(), before[-1])


def test_a_parameter_unfrozen_in_the_middle_of_a_period_on_all_ranks(comm):
    model = make_model(comm.rank)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.01)
    with WAGMA(model, optimizer, comm=comm, sync_period=4) as averager:
        start = model[0].weight.detach().clone()
        for step in range(8):
            if step == 2:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
                averager.refresh()
            backward(model, comm.rank, step)
            optimizer.step()
        assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        assert not torch.allclose(model[0].weight, start)


def test_two_models_with_an_optimizer_each(comm):
    generator, critic = make_model(comm.rank), make_model(comm.rank + 1)
    adam = torch.optim.Adam(generator.parameters())
    sgd = torch.optim.SGD(critic.parameters(), lr=0.1)
    with (
        WAGMA(generator, adam, comm=comm, sync_period=3) as one,
        WAGMA(critic, sgd, comm=comm) as other,
    ):
        for step in range(6):
            time.sleep(0.002 * (comm.rank == step % 4))
            backward(critic, comm.rank, step)
            sgd.step()
            if step % 2:
                backward(generator, comm.rank, step)
                adam.step()
        one.synchronize()
        other.synchronize()
        assert (one.collective.version, other.collective.version) == (3, 6)
        assert same_everywhere(
            comm, (one.flat.vectors[0].tobytes(), other.flat.vectors[0].tobytes())
        )


def test_training_that_waits_for_its_group_is_repeatable_bit_for_bit(comm):
    def delay(_):
        time.sleep(0.002 * comm.rank)

    first = train(comm, 9, make=OPTIMIZERS["adam"], wait="group")
    second = train(comm, 9, delay, make=OPTIMIZERS["adam"], wait="group")
    assert floats(first).tobytes() == floats(second).tobytes()


@pytest.mark.ranks(1, 3, 4)
def test_every_rank_starts_from_the_first_ranks_parameters_and_buffers(comm):
    model = make_model(comm.rank)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf) * (comm.rank + 1))
    model.register_buffer("flags", torch.tensor([comm.rank == 0, True]))
    model[0].weight.data = torch.randn(8, 4).t().contiguous().t()
    model[2].num_batches_tracked += comm.rank + 5
    model[2].running_mean += comm.rank
    before = comm.bcast({name: value.clone() for name, value in model.state_dict().items()})
    with WAGMA(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm) as averager:
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        assert model[2].num_batches_tracked == 5 and model.flags.tolist() == [True, True]


@pytest.mark.ranks(1, 3, 4, 8)
def test_the_default_communicator_is_all_ranks(comm):
    model = make_model(comm.rank)
    with WAGMA(model) as averager:
        assert averager.collective.size == comm.size
        assert averager.collective.rank == comm.rank
        assert averager.collective.group_size == default_group_size(comm.size)


def test_close_returns_although_nobody_trains(comm):
    model = make_model(comm.rank)
    averager = WAGMA(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
    averager.close()
    assert averager.collective.closed


def test_an_exception_on_every_rank_closes(comm):
    model = make_model(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = WAGMA(model, optimizer, comm=comm)

    def fail():
        with averager:
            backward(model, comm.rank, 0)
            optimizer.step()
            comm.Barrier()  # or a rank hears of another's exception in its step
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert averager.collective.closed


def test_the_averaged_models_loss_falls_with_a_straggler(comm):
    torch.manual_seed(3)
    truth, batch = torch.randn(4, 3), torch.randn(64, 4)

    def error(model):
        return (model(batch) - batch @ truth).square().mean()

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAGMA(model, optimizer, comm=comm, sync_period=8) as averager:
        start = error(model).item()
        for step in range(60):
            time.sleep(0.005 if comm.rank == step % comm.size else 0)
            optimizer.zero_grad()
            error(model).backward()
            optimizer.step()
        with averager.averaged():
            assert error(model).item() < 0.02 * start


def narrow(model):
    model[3] = nn.Linear(8, 2)


def lacking(model):
    model[2] = nn.Identity()


def eighth(model):
    model.eighth = nn.Parameter(torch.zeros(3).to(torch.float8_e5m2))


def double(model):
    model.double()


def lazy(model):
    model[3] = nn.LazyLinear(3)


def unfit(model):
    model.named_modules = lambda *_: 1 / 0


def permuted(model):
    model[0].weight.data = torch.zeros(4, 8).t()


@before_transports
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (narrow, ValueError, r"has parameter '3.weight', float32 \(2, 8\) where .* \(3, 8\)"),
        (lacking, ValueError, "has parameter '3.weight', .* where rank 0 has parameter '2.weight'"),
        (double, ValueError, r"has parameter '0.weight', float64 \(8, 4\) where .* float32"),
        (eighth, TypeError, "parameter 'eighth' is torch.float8_e5m2"),
        (lazy, ValueError, "parameter '3.weight' has no shape yet"),
        (unfit, ZeroDivisionError, "division by zero"),
        (permuted, ValueError, r"'0.weight', float32 \(8, 4\), strides \(1, 8\) where"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["on-first", "on-last"])
def test_models_that_differ_raise_the_same_on_every_rank(comm, first, change, kind, message):
    odd = 0 if first else comm.size - 1
    model = make_model(comm.rank)
    if comm.rank == odd:
        change(model)
    inner = torch.optim.SGD([model[0].bias], lr=0.1)
    with pytest.raises(kind) as raised:
        WAGMA(model, inner, comm=comm)
    text = str(raised.value)
    assert same_everywhere(comm, text)
    if kind is not ValueError or not first or change is lazy:
        assert text.startswith(f"rank {odd}: ")
        raised.match(message)
    else:  # the others differ from rank 0
        assert text.startswith("ranks 1-3: ")


@before_transports
def test_settings_that_differ_raise_on_every_rank(comm):
    model = make_model(comm.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as raised:
        WAGMA(model, inner, comm=comm, sync_period=5 if comm.rank else 6)
    assert same_everywhere(comm, str(raised.value))
    raised.match("sync_period")


@pytest.mark.ranks(3)
def test_two_ripples_optimizers_in_a_process_are_refused_on_every_rank(comm):
    """Their ranks would wait for each other's next steps; one for both models works."""
    both = nn.ModuleList([make_model(0), make_model(1)])
    with Ripples(both[0], momentum_sgd(both[0].parameters()), comm=comm):
        with pytest.raises(RuntimeError, match=r"Ripples has one.*close\(\).*one module"):
            Ripples(both[1], momentum_sgd(both[1].parameters()), comm=comm)
        with Ripples(both[1], momentum_sgd(both[1].parameters()), comm=comm, groups="static"):
            pass
    optimizer = momentum_sgd(both.parameters())
    with Ripples(both, optimizer, comm=comm):
        backward(both[0], comm.rank, 0)
        backward(both[1], comm.rank, 0)
        optimizer.step()


@before_transports
@pytest.mark.parametrize(
    ("kind", "name"), [(WAGMA, "stalls"), (Allreduce, "group_size"), (DPSGD, "group_size")]
)
def test_an_unknown_argument_on_one_rank_raises_on_all(comm, kind, name):
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {name: None} if comm.rank == 1 else {}
    says = rf"{kind.__name__}\(\) got an unexpected keyword argument '{name}'"
    with pytest.raises(TypeError, match=says):
        kind(model, sgd, comm=comm, **arguments)


PARTS = {
    "model": (averaging, "FlatModel", WAGMA),
    "its second vector": (flat, "new_vector", WAGMA),
    "gradients": (allreduce, "FlatGradients", Allreduce),
    "copies": (flat, "for_collective", Allreduce),
}


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("part", PARTS)
def test_a_rank_that_has_no_memory_for_its_part_is_an_error_on_all_ranks(comm, monkeypatch, part):
    """As where several ranks share a device, and the last one's model does not fit."""
    module, name, kind = PARTS[part]
    function, calls = getattr(module, name), itertools.count(int(part != "its second vector"))

    def fail(*arguments, **options):
        if next(calls):
            raise torch.OutOfMemoryError("device is full")
        return function(*arguments, **options)

    model = nn.ParameterList([torch.ones(3), torch.ones(5, dtype=torch.float64)])
    with monkeypatch.context() as full:
        if comm.rank == 1:
            full.setattr(module, name, fail)
        with pytest.raises(RuntimeError, match="^rank 1: .*device is full"):
            kind(model, momentum_sgd(model.parameters()), comm=comm)
    optimizer = momentum_sgd(model.parameters())
    with kind(model, optimizer, comm=comm):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
