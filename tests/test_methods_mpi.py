"""Every method on several ranks; and Allreduce and LocalSGD beside the mathematics."""

from __future__ import annotations

import functools
import time
from pickle import PicklingError

import numpy as np
import pytest
import torch
from methods import (
    METHODS,
    backward,
    bits,
    bits_of,
    checkpoint,
    each_method,
    each_method_in_step,
    local_bits,
    make_model,
    momentum_sgd,
    restore,
)
from together import interrupted, same_everywhere
from torch import nn

from collectives import RankFailedError
from wagma.optim import Allreduce, EagerSGD, LocalSGD

# What each method averages with both transports is tested with its collective.
pytestmark = [pytest.mark.mpi, pytest.mark.transports("shared")]


def train(comm, model, optimizer, steps):
    for step in steps:
        backward(model, comm.rank, step)
        optimizer.step()


# Every method


@each_method_in_step
def test_averaged_is_the_mean_and_leaves_training_as_it_was(comm, method):
    def evaluate(model, optimizer, averager):
        own = bits_of(model), local_bits(optimizer)
        with averager.averaged():
            averaged = averager.flat.vectors[0].copy()
            assert same_everywhere(comm, averaged.tobytes())
            model(torch.ones(3, 4))  # changes BatchNorm's statistics
            nn.init.zeros_(model[0].weight)
        assert (bits_of(model), local_bits(optimizer)) == own
        return averaged

    ends = []
    for evaluates in (True, False):
        model = make_model(comm.rank)
        with method.training(model, comm) as (optimizer, averager):
            for step in range(7):
                train(comm, model, optimizer, [step])
                if evaluates and step % 3 == 1:
                    evaluate(model, optimizer, averager)
            averager.complete()
            ends.append((bits_of(model), local_bits(optimizer)))
            own = averager.flat.vectors[0].copy()
            averaged = evaluate(model, optimizer, averager)
            mean = np.mean(comm.allgather(own), axis=0, dtype=np.float64)
            if method.holds:
                np.testing.assert_allclose(averaged, mean, rtol=1e-5, atol=1e-6)
    if method.repeatable:
        assert ends[0] == ends[1]


@each_method_in_step
def test_training_continues_exactly_from_its_state(comm, method):
    model = make_model(comm.rank)
    with method.training(model, comm) as (optimizer, averager):
        train(comm, model, optimizer, range(6))
        saved = checkpoint(model, optimizer, averager)
        train(comm, model, optimizer, range(6, 11))
        averager.complete()
        expected = bits_of(model), local_bits(optimizer)
    again = make_model(17 + comm.rank)
    with method.training(again, comm) as (optimizer, averager):
        train(comm, again, optimizer, [99])
        restore(saved, again, optimizer, averager)
        assert averager.collective.version == 6
        train(comm, again, optimizer, range(6, 11))
        averager.complete()
        assert averager.result.version == 10
        if method.repeatable:
            assert (bits_of(again), local_bits(optimizer)) == expected


@pytest.mark.ranks(3, 4)
@each_method
def test_after_joining_all_have_the_same_model_and_go_on(comm, method):
    model = make_model(comm.rank)
    with method.training(model, comm) as (optimizer, averager):
        for epoch in range(2):
            steps = [0, 9, 3, 5, 9, 1, 6, 2][(comm.rank + epoch) % comm.size]
            with averager.join():
                train(comm, model, optimizer, range(steps))
            if method.in_step:
                assert averager.collective.version == 9 * (epoch + 1)
            assert same_everywhere(comm, bits(model.parameters()))
            assert all(value.isfinite().all() for value in model.state_dict().values())
            assert averager.state_dict()["equal"]
        averager.synchronize()
        averaged = [*averager.flat.parameters, *averager.flat.buffers]
        assert same_everywhere(comm, bits(tensor.value for tensor in averaged))
        assert averager.state_dict()["equal"]


def test_models_are_said_to_be_equal_until_the_next_step(comm):
    model = make_model(comm.rank)
    optimizer = momentum_sgd(model.parameters())
    with LocalSGD(model, optimizer, comm=comm) as averager:
        averager.synchronize()
        saved = averager.state_dict()
        assert saved["equal"]
        train(comm, model, optimizer, range(1))
        assert not averager.state_dict()["equal"]
        averager.synchronize()
        averager.load_state_dict(saved)
        assert not averager.state_dict()["equal"]


@pytest.mark.ranks(3, 4)
@each_method
def test_state_that_is_not_finite_does_not_last(comm, method):
    """A rank with one bad gradient is left out, and then takes part again with finite momentum."""
    model = make_model(comm.rank)
    excluded = []
    with method.training(model, comm) as (optimizer, averager):
        with averager.join():
            for step in range(30):
                backward(model, comm.rank, step)
                if (comm.rank, step) == (1, 2):
                    next(model.parameters()).grad.fill_(torch.nan)
                optimizer.step()
                excluded.append(averager.collective.statistics().left_out)
        assert averager.collective.statistics().left_out == excluded[20]
        for entry in optimizer.state.values():
            assert entry["momentum_buffer"].isfinite().all()


@each_method
def test_an_error_on_one_rank_raises_on_all(comm, method, capsys):
    model = make_model(comm.rank)
    failing = comm.rank == 2
    raised = pytest.raises(KeyError if failing else RankFailedError, match="mine")
    with raised, method.training(model, comm) as (optimizer, averager):
        deadline = time.monotonic() + 20
        for step in range(10**9):
            assert time.monotonic() < deadline
            train(comm, model, optimizer, [step])
            if failing and step == 5:
                raise KeyError("mine")
            time.sleep(0.001)
    assert averager.closed and not averager.flat.vectors
    assert all(value.isfinite().all() for value in model.state_dict().values())


@each_method
def test_closing_returns_although_nobody_trains(comm, method):
    averager = method.make(make_model(comm.rank), comm)
    averager.close()
    assert averager.closed


@each_method
def test_ranks_that_differ_are_told_alike(comm, method):
    other = next(each for each in METHODS.values() if each.kind is not method.kind)
    odd = comm.rank == 2
    with pytest.raises(ValueError) as raised:
        (other if odd else method).make(make_model(), comm)
    assert same_everywhere(comm, str(raised.value))
    raised.match(f"algorithm differs .* {method.kind.__name__} on ranks 0-1, 3; .* on rank 2")
    model = make_model()
    if odd:
        model[3] = nn.Linear(8, 2)
    with pytest.raises(ValueError, match="rank 2: the model has parameter '3.weight'"):
        method.make(model, comm)


# Allreduce


class Uneven:
    """Batches of unequal sizes, and the weights that make their mean that of all samples."""

    def __init__(self, comm):
        self.rank = comm.rank
        self.sizes = [3 + 2 * rank for rank in range(comm.size)]
        self.weight = self.sizes[comm.rank] / np.mean(self.sizes)

    def everybodys(self, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(sum(self.sizes), 4, generator=generator, dtype=torch.float64)

    def mine(self, step):
        return self.everybodys(step).split(self.sizes)[self.rank]


def square_error(model, batch):
    """Leave the gradient in the model, and return the loss."""
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    return loss


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize(
    "make",
    [momentum_sgd, lambda parameters: torch.optim.Adam(parameters, lr=0.01)],
    ids=["momentum", "adam"],
)
def test_allreduce_is_one_process_that_trains_on_all_batches(comm, make):
    """With a scheduler, a closure in every other step, and a layer that is trained later."""

    def network():
        torch.manual_seed(comm.rank)  # rank 0's is everybody's
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model[0].requires_grad_(False)
        return model

    batches = Uneven(comm)
    model = network()
    local = make(model[2].parameters())
    with Allreduce(model, local, comm=comm) as averager:
        averager.weight = batches.weight
        expected = network()
        expected.load_state_dict(model.state_dict())
        plain = make(expected[2].parameters())
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (local, plain)]
        for step in range(9):
            if step == 4:
                for network, either in ((model, local), (expected, plain)):
                    network[0].requires_grad_(True)
                    either.add_param_group({"params": network[0].parameters(), "lr": 0.02})
                averager.refresh()

            closure = functools.partial(square_error, model, batches.mine(step))
            mine = closure().item()
            if step % 2:
                assert local.step(closure).item() == mine
            else:
                assert local.step() is None
            square_error(expected, batches.everybodys(step))
            plain.step()
            for scheduler in schedulers:
                scheduler.step()

            assert averager.result.version == step and averager.result.synchronized
            assert averager.result.group == tuple(range(comm.size))
            assert same_everywhere(comm, bits_of(model) + local_bits(local))
            for one, other in zip(model.parameters(), expected.parameters()):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert len(local.state) == 4


@pytest.mark.ranks(1, 3, 4)
def test_a_parameter_gets_the_mean_gradient_if_any_rank_has_one_and_stays_without_if_none(comm):
    """One layer for each rank, of all dtypes, and one that nobody uses."""
    size, rank = comm.size, comm.rank
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.float32]
    model = nn.ModuleList(nn.Linear(2, 1, dtype=dtypes[i % 4]) for i in range(size + 1))
    model.register_buffer("statistic", torch.zeros(3))
    local = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with Allreduce(model, local, comm=comm) as averager:
        before = [part.weight.detach().clone() for part in model]
        model.statistic.fill_(rank)
        for step in range(2):
            local.zero_grad()
            model[rank].weight.grad = torch.full_like(model[rank].weight, 4.0)
            if step:  # as it is in the one rank's part of a batch where nothing is of weight
                model[size].bias.grad = torch.ones(1, dtype=dtypes[size % 4])
            averager.weight = 0 if rank == size - 1 and size > 1 and step else 1
            local.step()
            assert same_everywhere(comm, bits(model.parameters()))
            assert model[rank].bias.grad is None
            counted = size - step if size > 1 else 1
            for part in list(model)[: counted if size > 1 else 1]:
                expected = torch.full_like(part.weight, 4 / counted)
                torch.testing.assert_close(part.weight.grad, expected)
        assert torch.equal(model[size].weight, before[size]) and model[size].weight.grad is None
        if size > 1:  # only who had weight 0 had a gradient of it in the second step
            assert model[size - 1].weight.grad is None
        assert torch.equal(model.statistic, torch.full((3,), float(rank)))
        with averager.averaged():
            assert same_everywhere(comm, bits([model.statistic]))
        averager.synchronize()
        assert same_everywhere(comm, bits([*model.parameters(), model.statistic]))


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_rank_whose_grad_scaler_finds_infinity_takes_the_others_step(comm, clip):
    """In step 1 one rank's gradients are infinite, in step 3 all ranks'; scales differ then."""
    odd = comm.size - 1
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Allreduce(model, optimizer, comm=comm) as averager:
        expected = model.weight.detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(6):
            optimizer.zero_grad()
            bad = step == 3 or (step == 1 and comm.rank == odd)
            gradient = float(comm.rank + step)
            scaler.scale(model.weight.sum() * (torch.inf if bad else gradient)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(model.parameters(), 100)  # makes infinity finite
            scaler.step(optimizer)
            scaler.update()
            ranks = [] if step == 3 else range(odd) if step == 1 else range(comm.size)
            if ranks:
                expected -= 0.5 * np.mean([rank + step for rank in ranks])
            torch.testing.assert_close(model.weight.detach(), expected)
            assert same_everywhere(comm, bits(model.parameters()))
            assert averager.result.weight == len(ranks)
            assert averager.collective.version == step + 1
        assert scaler.get_scale() == (2.0 if comm.rank == odd else 4.0)


@pytest.mark.ranks(3, 4)
def test_allreduce_after_joining_is_as_if_those_who_went_on_had_been_alone(comm):
    """Ranks that made fewer steps get the momentum and the learning rate of those of the most."""
    steps = [2, 0, 3, 1][: comm.size]

    def learner(seed):
        model = make_model(seed, torch.float64)
        return model, momentum_sgd(model.parameters())

    model, local = learner(comm.rank)
    with Allreduce(model, local, comm=comm) as averager:
        scheduler = torch.optim.lr_scheduler.StepLR(local, 1, 0.5)
        with averager.join():
            for step in range(steps[comm.rank]):
                train(comm, model, local, [step])
                scheduler.step()
        assert local.param_groups[0]["lr"] == 0.1 / 8
        train(comm, model, local, range(3, 5))
        assert same_everywhere(comm, bits(model.parameters()) + local_bits(local))

    expected, plain = learner(0)
    for step in range(5):
        backward(expected, comm.rank, step)
        plain.param_groups[0]["lr"] = 0.1 / 2 ** min(step, 3)
        for parameter in expected.parameters():
            gradients = comm.allgather(parameter.grad)
            there = [each for each, made in zip(gradients, steps) if made > step or step >= 3]
            parameter.grad = torch.stack(there).mean(0)
        plain.step()
    for one, other in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("during", ["the average", "the step after it"])
def test_a_rank_that_lacks_a_step_of_allreduce_is_named_in_the_next_one(comm, during):
    model = make_model(comm.rank)
    optimizer = momentum_sgd(model.parameters())
    with Allreduce(model, optimizer, comm=comm) as averager:
        train(comm, model, optimizer, range(2))
        if comm.rank == 0:
            backward(model, comm.rank, 2)
            if during == "the average":
                with interrupted():
                    optimizer.step()
        comm.Barrier()
        if comm.rank == 0 and during != "the average":
            hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            hook.remove()
        elif comm.rank:
            train(comm, model, optimizer, [2])
        averager.synchronize()  # which makes parameters equal, and momentum not
        assert averager.state_dict()["equal"] == (comm.rank != 0)
        comm.Barrier()
        named = r"an exception ended a step of rank 0 after its average had begun"
        kind = RankFailedError if comm.rank else RuntimeError
        with pytest.raises(kind, match=named):
            train(comm, model, optimizer, [3])


def test_a_rank_of_allreduce_that_lacks_a_step_goes_on_from_a_loaded_state(comm):
    model = make_model(comm.rank)
    optimizer = momentum_sgd(model.parameters())
    with Allreduce(model, optimizer, comm=comm) as averager:
        train(comm, model, optimizer, range(2))
        saved = checkpoint(model, optimizer, averager)
        hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(comm, model, optimizer, [2])
        hook.remove()
        restore(saved, model, optimizer, averager)
        train(comm, model, optimizer, range(2, 4))
        assert same_everywhere(comm, bits(model.parameters()) + local_bits(optimizer))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [Allreduce, EagerSGD])
def test_local_state_that_cannot_be_pickled_is_an_error_on_all_ranks_that_join(comm, kind):
    model = make_model(comm.rank)
    groups = [{"params": model.parameters(), "rule": lambda: 0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with kind(model, optimizer, comm=comm) as averager:
        with pytest.raises((AttributeError, TypeError, PicklingError)) as raised, averager.join():
            train(comm, model, optimizer, range(comm.rank))
        assert str(raised.value).startswith("rank 2: Can't pickle local object")
        assert same_everywhere(comm, str(raised.value))


# LocalSGD


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("period", [1, 3])
def test_local_sgd_is_what_numpy_makes_of_it(comm, period):
    """Momentum stays local; the weights are those of the step that averages."""
    random = np.random.default_rng(0)
    targets = random.normal(size=(comm.size, 5))
    weights = random.uniform(0.5, 2, size=(10, comm.size))
    x, momentum = np.tile(random.normal(size=5), (comm.size, 1)), np.zeros((comm.size, 5))

    model = nn.Linear(5, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(x[:1]))
    target = torch.from_numpy(targets[comm.rank])
    optimizer = momentum_sgd(model.parameters())
    with LocalSGD(model, optimizer, comm=comm, sync_period=period) as averager:
        for step in range(10):
            optimizer.zero_grad()
            (0.5 * (model.weight - target).square().sum()).backward()
            averager.weight = weights[step, comm.rank]
            optimizer.step()

            momentum = 0.9 * momentum + (x - targets)
            x = x - 0.1 * momentum
            synchronized = (step + 1) % period == 0
            if synchronized:
                x[:] = np.average(x, axis=0, weights=weights[step])
                assert same_everywhere(comm, bits_of(model))
            np.testing.assert_allclose(model.weight.detach()[0], x[comm.rank], rtol=1e-10)
            assert averager.result.synchronized == synchronized
            everyone = tuple(range(comm.size))
            assert averager.result.group == (everyone if synchronized else (comm.rank,))


@pytest.mark.ranks(3, 4)
def test_local_sgd_leaves_out_a_model_that_is_not_finite_and_heals_it(comm):
    model = nn.Linear(1, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSGD(model, sgd, comm=comm, sync_period=2) as averager:
        for _ in range(2):
            with torch.no_grad():
                model.weight.fill_(comm.rank or torch.nan)
            sgd.step()
        assert model.weight.item() == np.mean(range(1, comm.size))
        assert averager.result.weight == comm.size - 1


# Several optimizers


@each_method
def test_ranks_with_fewer_steps_of_two_optimizers_join_both(comm, method):
    """After nested blocks, in one statement or two; the outer one's may make steps of its own."""
    if method.exclusive:
        pytest.skip("it would wait for a rank that waits in the other optimizer")
    models = [make_model(seed) for seed in (0, 1)]
    other = METHODS["wagma"] if method.kind is Allreduce else METHODS["allreduce"]
    with (
        method.training(models[0], comm) as (first, outer),
        other.training(models[1], comm) as (second, inner),
    ):
        with outer.join(), inner.join():
            for step in range(2 + 3 * comm.rank):
                train(comm, models[0], first, [step])
                train(comm, models[1], second, [step])
        assert same_everywhere(comm, b"".join(bits(model.parameters()) for model in models))
        with outer.join():
            with inner.join():
                for step in range(2 + 3 * (comm.size - comm.rank)):
                    train(comm, models[1], second, [step])
            with pytest.raises(RuntimeError, match="has left its join"):
                second.step()
            train(comm, models[0], first, range(comm.rank))
        assert same_everywhere(comm, b"".join(bits(model.parameters()) for model in models))
        for model, optimizer in zip(models, (first, second)):
            train(comm, model, optimizer, [0])


def serve_until_all_come(comm, averager):
    """Who waits for nobody has still to serve the others."""
    request = comm.Ibarrier()
    while not request.Test():
        averager.collective.statistics()


@each_method
def test_without_a_progress_thread_steps_bring_models_together(comm, method):
    model = nn.Linear(4, 1, bias=False)
    local = torch.optim.SGD(model.parameters(), lr=1.0)
    with method.make(model, comm, lambda _: local, engine="none") as averager:
        steps = 60
        for step in range(1, steps + 1):
            model.weight.grad = torch.full_like(model.weight, -float(comm.rank))
            local.step()
            time.sleep(0.0005)
            if step % 10 == 0 and not method.exclusive:
                serve_until_all_come(comm, averager)  # else a rank that stands still meets nobody
        averager.complete()
        if method.exclusive:
            with averager.averaged():  # from here on nobody waits for this rank's next step
                pass
        serve_until_all_come(comm, averager)
        spread = np.ptp(comm.allgather(model.weight[0, 0].item()))
        assert spread < 0.7 * steps * (comm.size - 1)  # without averages it would be all of that
