"""WAGMA on several ranks: it averages what the paper says, and every rank agrees."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import torch
from torch import nn

from collectives.topology import group_of
from wagma.optim import WAGMA
from wagma.optim.wagma import default_group_size

pytestmark = pytest.mark.mpi

LATE = ["paper", "conserving"]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return model.to(dtype)


def backward(model, rank, step):
    """Leave the gradient of this rank's own batch of the step in the model."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    batch = torch.randn(16, 4, generator=generator).to(model[0].weight.dtype)
    model.zero_grad()
    (model(batch) - rank).square().mean().backward()


def floats(model):
    """Return the floating-point tensors of the model as one new array."""
    values = [v for v in model.state_dict().values() if v.is_floating_point()]
    return torch.cat([value.flatten() for value in values]).numpy()


def set_floats(model, vector):
    start = 0
    for value in model.state_dict().values():
        if value.is_floating_point():
            part = vector[start : start + value.numel()]
            value.copy_(torch.from_numpy(part).view(value.shape))
            start += value.numel()


def train(
    comm,
    steps,
    each_step=lambda optimizer: None,
    make=OPTIMIZERS["sgd"],
    dtype=torch.float32,
    **settings,
):
    """Train this rank's model, call `each_step` after every step, and return the model."""
    model = make_model(comm.rank, dtype)
    with WAGMA(make(model.parameters()), model, comm=comm, **settings) as optimizer:
        for step in range(steps):
            backward(model, comm.rank, step)
            optimizer.step()
            each_step(optimizer)
    return model


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


def same_everywhere(comm, thing):
    return len(set(comm.allgather(thing))) == 1


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_groups_of_all_ranks_equal_an_allreduce_of_the_model_every_step(comm, make, late):
    everyone = range(comm.size)
    expected = train_reference(comm, 6, lambda step: everyone, make, torch.float64)

    model = make_model(comm.rank, torch.float64)
    optimizer = WAGMA(
        make(model.parameters()),
        model,
        comm=comm,
        group_size=comm.size,
        sync_period=4,
        wait="group",
        late=late,
    )
    with optimizer:
        for step in range(6):
            backward(model, comm.rank, step)
            optimizer.step()
            assert optimizer.result.timely
            assert same_everywhere(comm, floats(model).tobytes())
    np.testing.assert_allclose(floats(model), floats(expected), rtol=1e-10, atol=1e-13)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", LATE)
def test_each_step_averages_the_papers_group_and_every_tau_steps_all(comm, late):
    size, period = default_group_size(comm.size), 3

    def partners(step):
        if (step + 1) % period == 0:
            return range(comm.size)
        return group_of(comm.rank, comm.size, size, step)

    make = OPTIMIZERS["sgd"]
    expected = train_reference(comm, 8, partners, make, torch.float64)
    model = make_model(comm.rank, torch.float64)
    with WAGMA(
        make(model.parameters()), model, comm=comm, sync_period=period, wait="group", late=late
    ) as optimizer:
        assert optimizer.collective.group_size == size
        for step in range(8):
            backward(model, comm.rank, step)
            optimizer.step()
            assert optimizer.result.synchronized == ((step + 1) % period == 0)
            if not optimizer.result.synchronized:
                assert tuple(optimizer.result.group) == tuple(partners(step))
    np.testing.assert_allclose(floats(model), floats(expected), rtol=1e-10, atol=1e-13)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_ranks_agree_bit_for_bit_after_every_synchronization(comm, wait, late):
    random = np.random.default_rng(comm.rank)
    synchronized = []

    def observe(optimizer):
        time.sleep(random.uniform(0, 0.004) if comm.rank else 0.006)
        if optimizer.result.synchronized:
            synchronized.append(optimizer.flat.vectors[0].tobytes())
            assert optimizer.result.version == optimizer.collective.version - 1

    model = train(comm, 17, observe, sync_period=5, wait=wait, late=late)

    assert len(synchronized) == 3 and len(set(synchronized)) == 3
    assert same_everywhere(comm, tuple(synchronized))
    assert np.isfinite(floats(model)).all()


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_synchronize_makes_all_models_equal_and_is_not_a_step(comm, wait, late):
    def synchronize(optimizer):
        version = optimizer.collective.version
        optimizer.synchronize()
        assert same_everywhere(comm, optimizer.flat.vectors[0].tobytes())
        assert optimizer.collective.version == version

    train(comm, 4, synchronize, wait=wait, late=late)


@pytest.mark.parametrize("late", LATE)
def test_batchnorm_statistics_are_averaged_and_its_counter_is_not(comm, late):
    model = make_model(comm.rank)
    with WAGMA(OPTIMIZERS["sgd"](model.parameters()), model, comm=comm, late=late) as optimizer:
        for _ in range(comm.rank + 1):
            model(torch.randn(4, 4) + comm.rank)
        statistics = (model[2].running_mean, model[2].running_var)
        own = comm.allgather([value.numpy() for value in statistics])
        assert comm.size == 1 or not np.allclose(own[0][0], own[1][0])
        optimizer.synchronize()
        for value, expected in zip(statistics, np.mean(own, axis=0), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert model[2].num_batches_tracked == comm.rank + 1


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_averaged_holds_the_mean_of_all_models_and_restores_each_ones_own(comm, wait, late):
    random = np.random.default_rng(comm.rank)

    def evaluate(optimizer):
        time.sleep(random.uniform(0, 0.004) * comm.rank)
        own = optimizer.flat.vectors[0].copy()
        mean = np.mean(comm.allgather(own), axis=0, dtype=np.float64)
        with optimizer.averaged():
            np.testing.assert_allclose(optimizer.flat.vectors[0], mean, rtol=1e-5, atol=1e-7)
            assert same_everywhere(comm, optimizer.flat.vectors[0].tobytes())
        assert optimizer.flat.vectors[0].tobytes() == own.tobytes()

    train(comm, 9, evaluate, sync_period=4, wait=wait, late=late)


@pytest.mark.ranks(3, 4, 8)
def test_the_conserving_rule_has_every_ranks_every_update_in_the_average(comm):
    random = np.random.default_rng(comm.rank)
    model = nn.Linear(50, 1, bias=False).double()
    optimizer = WAGMA(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model,
        comm=comm,
        sync_period=8,
        late="conserving",
    )
    with optimizer:
        start = model.weight.detach().clone()
        for step in range(1, 31):
            time.sleep(random.uniform(0, 0.003) * (1 + 4 * (comm.rank == 1)))
            optimizer.zero_grad()
            (model.weight.sum() * (comm.rank + 1)).backward()
            optimizer.step()
            if step % 7 == 0:
                done = 0.5 * step * (comm.size + 1) / 2
                with optimizer.averaged():
                    torch.testing.assert_close(model.weight.detach(), start - done)


@pytest.mark.parametrize("late", LATE)
def test_evaluating_does_not_disturb_training(comm, late):
    def evaluate(optimizer):
        with contextlib.suppress(KeyError), optimizer.averaged():
            optimizer.flat.vectors[0] *= 2
            raise KeyError

    settings = {"sync_period": 4, "wait": "group", "late": late}
    with_evaluation = train(comm, 10, evaluate, **settings)
    without = train(comm, 10, **settings)
    assert floats(with_evaluation).tobytes() == floats(without).tobytes()


def test_training_that_waits_for_its_group_is_repeatable_bit_for_bit(comm):
    def delay(optimizer):
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
    with WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), model, comm=comm) as optimizer:
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert same_everywhere(comm, optimizer.flat.vectors[0].tobytes())
        assert model[2].num_batches_tracked == 5 and model.flags.tolist() == [True, True]


@pytest.mark.ranks(1, 3, 4, 8)
def test_the_default_communicator_is_all_ranks(comm):
    model = make_model(comm.rank)
    with WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
        assert optimizer.collective.size == comm.size
        assert optimizer.collective.rank == comm.rank
        assert optimizer.collective.group_size == default_group_size(comm.size)


def test_close_returns_although_nobody_trains(comm):
    model = make_model(comm.rank)
    optimizer = WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), model, comm=comm)
    optimizer.close()
    assert optimizer.collective.closed


def test_an_exception_on_every_rank_closes(comm):
    model = make_model(comm.rank)
    optimizer = WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), model, comm=comm)

    def fail():
        with optimizer:
            backward(model, comm.rank, 0)
            optimizer.step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert optimizer.collective.closed


def test_the_averaged_models_loss_falls_with_a_straggler(comm):
    torch.manual_seed(3)
    truth, batch = torch.randn(4, 3), torch.randn(64, 4)

    def error(model):
        return (model(batch) - batch @ truth).square().mean()

    model = nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with WAGMA(inner, model, comm=comm, sync_period=8) as optimizer:
        start = error(model).item()
        for step in range(60):
            time.sleep(0.005 if comm.rank == step % comm.size else 0)
            optimizer.zero_grad()
            error(model).backward()
            optimizer.step()
        with optimizer.averaged():
            assert error(model).item() < 0.02 * start


def narrow(model):
    model[3] = nn.Linear(8, 2)


def lacking(model):
    model[2] = nn.Identity()


def phased(model):
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def double(model):
    model.double()


def lazy(model):
    model[3] = nn.LazyLinear(3)


def permuted(model):
    model[0].weight.data = torch.zeros(4, 8).t()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (narrow, ValueError, r"has parameter '3.weight', float32 \(2, 8\) where .* \(3, 8\)"),
        (lacking, ValueError, "has parameter '3.weight', .* where rank 0 has parameter '2.weight'"),
        (double, ValueError, r"has parameter '0.weight', float64 \(8, 4\) where .* float32"),
        (phased, TypeError, "parameter 'phase' is torch.complex64"),
        (lazy, ValueError, "parameter '3.weight' has no shape yet"),
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
        WAGMA(inner, model, comm=comm)
    text = str(raised.value)
    assert same_everywhere(comm, text)
    if kind is TypeError or not first or change is lazy:
        assert text.startswith(f"rank {odd}: ")
        raised.match(message)
    else:  # the others differ from rank 0
        assert text.startswith("ranks 1-3: ")


def test_settings_that_differ_raise_on_every_rank(comm):
    model = make_model(comm.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as raised:
        WAGMA(inner, model, comm=comm, sync_period=5 if comm.rank else 6)
    assert same_everywhere(comm, str(raised.value))
    raised.match("sync_period")
