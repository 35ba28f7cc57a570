"""Training that does not end alike everywhere, or that stops and continues; and mixed dtypes."""

from __future__ import annotations

import contextlib
import copy
import logging
import time

import pytest
import torch
from methods import (
    OPTIMIZERS,
    backward,
    checkpoint,
    floats,
    make_model,
    opened,
    restore,
    train,
)
from together import RULES, same_everywhere
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from collectives import ClosedError, DisagreementError
from wagma.optim import WAGMA, EagerSGD, LocalSGD, PartialReduce

# That training has the same bits with both transports is shown by test_bits.py.
pytestmark = [pytest.mark.mpi, pytest.mark.transports("shared")]


def beside(model, comm, make=OPTIMIZERS["sgd"], **settings):
    return WAGMA(model, make(model.parameters()), comm=comm, **settings)


def training(*arguments, **settings):
    return opened(beside(*arguments, **settings))


# Checkpoints


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_continues_exactly_after_a_round_trip(comm, late, make):
    """Stopped in the middle of a period, in new objects, with the groups of the old count."""
    size = min(2, comm.size)
    settings = {"make": make, "late": late, "wait": "group", "group_size": size, "sync_period": 5}
    results = []
    uninterrupted = make_model(comm.rank)
    with training(uninterrupted, comm, **settings) as (optimizer, averager):
        for step in range(16):
            if step == 7:
                saved = checkpoint(uninterrupted, optimizer, averager)
            backward(uninterrupted, comm.rank, step)
            optimizer.step()
            results.append((averager.result.version, averager.result.group))

    model = make_model(17 + comm.rank)
    with training(model, comm, **settings) as (optimizer, averager):
        backward(model, comm.rank, 99)
        optimizer.step()
        restore(saved, model, optimizer, averager)
        assert averager.collective.version == 7
        for step in range(7, 16):
            backward(model, comm.rank, step)
            optimizer.step()
            assert (averager.result.version, averager.result.group) == results[step]
    for one, other in zip(
        model.state_dict().values(), uninterrupted.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_states_of_different_versions_are_refused_with_their_ranks(comm):
    with beside(make_model(), comm) as averager:
        state = averager.state_dict()
        state["version"] = 40 if comm.rank == 2 else 30
        others = "ranks 0-1, 3 .* 30" if comm.rank == 2 else "rank 2 .* 40"
        with pytest.raises(
            DisagreementError, match=rf"load\(\) of version {state['version']} .*{others}"
        ):
            averager.load_state_dict(state)


def saved_on(comm, averaged):
    """Return a model and state that each rank saves, inside `averaged()` or not."""
    model = nn.Linear(1, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSGD(model, sgd, comm=comm, sync_period=100) as averager:
        model.weight.detach().fill_(comm.rank)  # a rank's own update
        with averager.averaged() if averaged else contextlib.nullcontext():
            return copy.deepcopy(model.state_dict()), averager.state_dict()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("saving", "loading", "averaged", "mean", "warns"),
    [
        (4, 2, False, 0.5, "has the state of one of 4 ranks, loaded on 2: updates that only"),
        (2, 4, False, 0.5, "has the state of one of 2 ranks, loaded on 4: a model that several"),
        (4, 2, True, 1.5, None),
        (4, 4, False, 1.5, None),
    ],
)
def test_on_another_number_of_ranks_a_checkpoint_loses_what_its_warning_says(
    comm, caplog, saving, loading, averaged, mean, warns
):
    """Rank r's model is r: of all four the mean is 1.5, of the first two 0.5."""
    some = {ranks: comm.Split(comm.rank // ranks) for ranks in (2, 4)}
    saved = saved_on(some[saving], averaged)
    saved = comm.allgather(saved)[comm.rank % min(saving, loading)]
    model = nn.Linear(1, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSGD(model, sgd, comm=some[loading]) as averager:
        model.load_state_dict(saved[0])
        with caplog.at_level(logging.WARNING):
            averager.load_state_dict(saved[1])
        with averager.averaged():
            assert model.weight == mean
    expected = [warns] if warns and some[loading].rank == 0 else []
    assert len(caplog.messages) == len(expected)
    assert all(text in said for text, said in zip(expected, caplog.messages))
    for each in some.values():
        each.Free()


# Schedules where ranks make different numbers of steps


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("solo", [True, False])
def test_a_count_in_a_buffer_gives_all_ranks_one_learning_rate(comm, solo):
    """A scheduler counts a rank's own steps; the buffer, the mean of the ranks' steps."""
    model = make_model()
    model.register_buffer("steps", torch.zeros(()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if solo:
        averager = LocalSGD(model, sgd, comm=comm, trigger="solo", sync_period=5)
    else:
        averager = PartialReduce(model, sgd, group_size=2, comm=comm)
    sgd.register_step_post_hook(lambda *_: model.steps.add_(1))
    scheduler = LambdaLR(sgd, lambda _: max(0.0, 1 - model.steps.item() / 30))
    made = 0
    with averager:
        with averager.join():
            while model.steps < 30:
                backward(model, comm.rank, made)
                time.sleep(0.02 if comm.rank == 1 else 0.001)
                sgd.step()
                scheduler.step()
                made += 1
                if solo and averager.result.synchronized:
                    rates = sgd.param_groups[0]["lr"], model.steps.item()
                    averages = averager.collective.version
        scheduler.step()
        assert same_everywhere(comm, sgd.param_groups[0]["lr"])
        assert len(set(comm.allgather(scheduler.last_epoch))) > 1
        if solo:
            same = [each for each in comm.allgather((averages, rates)) if each[0] == averages]
            assert len({rate for _, rate in same}) == 1
            assert averager.state_dict()["version"] < made


@pytest.mark.parametrize("method", [WAGMA, LocalSGD, EagerSGD, "solo"])
def test_where_a_step_is_synchronized_all_models_are_equal(comm, method):
    model = make_model(comm.rank)
    solo = {"trigger": "solo"} if method == "solo" else {}
    method = LocalSGD if solo else method
    sgd = OPTIMIZERS["sgd"](model.parameters())
    models = {}
    averager = method(model, sgd, comm=comm, sync_period=4, **solo)
    with averager, averager.join():
        for step in range(12):
            backward(model, comm.rank, step)
            time.sleep(0.002 * (comm.rank == 1))
            sgd.step()
            if averager.result.synchronized:
                models[averager.result.version] = floats(model).tobytes()
    everyones = comm.allgather(models)
    assert len(models) >= 2
    for version in models:
        assert len({each[version] for each in everyones if version in each}) == 1


# Joining


def steps_of(rank, size, epoch):
    return [0, 9, 4, 23, 8, 1, 15, 3][(rank + epoch) % size]


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_ranks_with_fewer_batches_join_and_all_end_with_the_same_model(comm, late, wait):
    model = make_model(comm.rank)
    with training(
        model, comm, late=late, wait=wait, sync_period=6, group_size=min(2, comm.size)
    ) as (optimizer, averager):
        made = 0
        for epoch in range(2):
            steps = steps_of(comm.rank, comm.size, epoch)
            with averager.join():
                for step in range(steps):
                    backward(model, comm.rank, step)
                    optimizer.step()
                    time.sleep(0.001 * (comm.rank == 1))
            most = max(steps_of(rank, comm.size, epoch) for rank in range(comm.size))
            made += most
            assert averager.collective.version == made
            parameters = b"".join(v.detach().numpy().tobytes() for v in model.parameters())
            assert same_everywhere(comm, parameters)
            assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.ranks(3, 4)
def test_after_joining_the_model_is_the_average_of_those_that_made_the_most_steps(comm):
    model = nn.Linear(1, 1, bias=False)
    settings = {"late": "paper", "wait": "group", "group_size": 1, "sync_period": 1000}
    with training(model, comm, **settings) as (optimizer, averager):
        with torch.no_grad():
            model.weight.fill_(comm.rank)
        with averager.join():
            for _ in range(3 if comm.rank < 2 else 1):
                optimizer.step()
        assert model.weight.item() == 0.5


@pytest.mark.ranks(4)
def test_under_conserving_what_a_joined_rank_did_is_in_the_next_synchronization(comm):
    """Rank 3 adds 8 in its only step; the mean after the others' synchronization has 2 of it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with WAGMA(model, sgd, comm=comm, late="conserving", group_size=2, sync_period=4) as averager:
        with averager.join():
            for _ in range(1 if comm.rank == 3 else 4):
                model.weight.grad = torch.full((1, 1), -8.0 * (comm.rank == 3))
                sgd.step()
            if comm.rank != 3:
                assert averager.result.synchronized and averager.result.weight == 4
                torch.testing.assert_close(model.weight.item(), 2.0)
        torch.testing.assert_close(model.weight.item(), 2.0)
        assert same_everywhere(comm, model.weight.item())


def test_a_rank_that_closes_instead_of_joining_is_named(comm):
    model = make_model()
    averager = beside(model, comm)
    if comm.rank == 2:
        averager.close()
        return
    named = pytest.raises(ClosedError, match=r"rank 2 entered close\(\) after 0 calls")
    with named, averager.join():
        pass
    averager.close()


def test_an_error_inside_the_block_does_not_join(comm):
    model = make_model()
    with training(model, comm) as (optimizer, averager):
        with pytest.raises(KeyError, match="mine"), averager.join():
            raise KeyError("mine")
        optimizer.step()
        assert averager.collective.version == 1


# Dtypes and weights


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_a_model_of_several_dtypes_is_averaged_as_one(comm, late):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].half()
    model[1].bfloat16()
    model[2].double()
    settings = {"late": late, "wait": "group", "group_size": comm.size}
    with training(model, comm, **settings) as (optimizer, _):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(comm.rank)
            model[3].running_mean.fill_(8 * comm.rank)
        optimizer.step()
        mean = (comm.size - 1) / 2
        for parameter in model.parameters():
            tolerance = 0.01 if parameter.dtype is torch.bfloat16 else 1e-3
            torch.testing.assert_close(
                parameter.double(),
                torch.full_like(parameter, mean).double(),
                rtol=tolerance,
                atol=0,
            )
        torch.testing.assert_close(model[3].running_mean, torch.full((2,), 8 * mean))
        state = b"".join(
            value.detach().view(torch.uint8).numpy().tobytes() for value in model.parameters()
        )
        assert same_everywhere(comm, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_trains(comm, dtype):
    model = train(comm, 12, dtype=dtype, sync_period=4)
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_step_is_weighed(comm):
    model = nn.Linear(1, 1, bias=False)
    with training(model, comm, wait="group", group_size=4) as (optimizer, averager):
        with torch.no_grad():
            model.weight.fill_(comm.rank)
        averager.weight = comm.rank
        optimizer.step()
        torch.testing.assert_close(model.weight.item(), (1 + 4 + 9) / 6)
        assert averager.result.weight == 6
