"""WAGMA with `overlap`: the next gradient is computed while the model is averaged."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest
import torch
from methods import OPTIMIZERS, backward, checkpoint, floats, make_model, opened, restore
from together import (
    RULES,
    before_transports,
    interrupted,
    same_everywhere,
    wait_until,
)
from torch import nn

from collectives import GroupAllreduce, RankFailedError
from collectives.topology import default_group_size
from wagma.optim import WAGMA

# That training has the same bits with both transports is shown by test_bits.py.
pytestmark = [pytest.mark.mpi, pytest.mark.transports("shared")]


def beside(model, comm, make=OPTIMIZERS["sgd"], **settings):
    return WAGMA(model, make(model.parameters()), comm=comm, overlap=True, **settings)


def training(*arguments, **settings):
    return opened(beside(*arguments, **settings))


def scalar(comm, **settings):
    """Return a model of one weight, which is the rank, its optimizer and its averager.

    All ranks average in each step, and steps without gradients change nothing.
    """
    model = nn.Linear(1, 1, bias=False)
    settings = {"wait": "group", "group_size": comm.size, "sync_period": 100} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = WAGMA(model, optimizer, comm=comm, overlap=True, **settings)
    with torch.no_grad():
        model.weight.fill_(comm.rank)
    return model, optimizer, averager


def mean_of(comm):
    return (comm.size - 1) / 2


# The rule


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
def test_a_step_adds_the_update_of_the_old_models_gradient_to_the_new_average(comm, late):
    """Bit for bit what this does in numpy, with a collective that waits."""
    settings = {"group_size": default_group_size(comm.size), "sync_period": 4, "wait": "group"}
    model = nn.Linear(7, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    averager = WAGMA(model, optimizer, comm=comm, overlap=True, late=late, **settings)
    x = model.weight.detach().numpy().ravel().copy()
    target = np.random.default_rng(comm.rank).normal(size=7)
    average, results = None, []
    with averager, GroupAllreduce(comm, x.copy(), late=late, **settings) as collective:
        for step in range(11):
            optimizer.zero_grad()
            (0.5 * (model.weight - torch.from_numpy(target)).square().sum()).backward()
            gradient = x - target
            optimizer.step()

            if average is not None:
                x = average
            x = x - 0.5 * gradient
            average = x.copy()
            result = collective(average)
            if result.synchronized:
                x, average = average, None
                assert same_everywhere(comm, x.tobytes())
                assert same_everywhere(comm, model.weight.detach().numpy().tobytes())
            assert model.weight.detach().numpy().tobytes() == x.tobytes(), step

            results.append(result)
            known = results if result.synchronized else results[:-1]
            assert repr(averager.result) == repr(known[-1] if known else None)
            versions = [one.version for one in averager.results]
            assert versions == {0: [], 3: [step - 1, step]}.get(step % 4, [step - 1])
        averager.complete()
        assert model.weight.detach().numpy().tobytes() == average.tobytes()
        assert repr(averager.result) == repr(results[-1])


@pytest.mark.ranks(3, 4)
def test_batchnorm_statistics_are_the_average_and_their_share_of_what_they_learnt_meanwhile(comm):
    """With a local optimizer that has a state, beside MPI's own allgather."""
    make = OPTIMIZERS["adam"]
    expected = make_model(0, torch.float64)
    plain = make(expected.parameters())
    buffers = {name for name, _ in expected.named_buffers()}
    model = make_model(comm.rank, torch.float64)
    average = started = None
    settings = {"wait": "group", "group_size": comm.size, "sync_period": 5}
    with training(model, comm, make, **settings) as (optimizer, _):
        for step in range(9):
            backward(expected, comm.rank, step)
            if average is not None:
                for name, value in expected.state_dict().items():
                    if value.is_floating_point():
                        share = 1 / comm.size if name in buffers else 1
                        value.copy_(average[name] + share * (value - started[name]))
            plain.step()
            started = copy.deepcopy(expected.state_dict())
            everyones = comm.allgather(started)
            average = {
                name: torch.stack([one[name].double() for one in everyones]).mean(0)
                for name in started
            }
            if step == 4:
                for name, value in expected.state_dict().items():
                    if value.is_floating_point():
                        value.copy_(average[name])
                average = None

            backward(model, comm.rank, step)
            optimizer.step()
            np.testing.assert_allclose(floats(model), floats(expected), rtol=1e-9, atol=1e-12)
            assert model[2].num_batches_tracked == step + 1
    assert not torch.allclose(model[2].running_mean, torch.zeros(8, dtype=torch.float64))


@pytest.mark.ranks(3, 4)
def test_a_step_returns_before_the_others_call_and_the_next_one_waits_for_them(comm):
    model, optimizer, averager = scalar(comm)
    with averager:
        if comm.rank == 0:
            optimizer.step()
            assert averager.result is None and model.weight.item() == 0
            for rank in range(1, comm.size):
                comm.send("returned", rank)
            optimizer.step()
            returned = time.monotonic()
            assert [result.version for result in averager.results] == [0]
            assert model.weight.item() == mean_of(comm)
            assert all(comm.recv(source=rank) < returned for rank in range(1, comm.size))
        else:
            wait_until(lambda: comm.iprobe(source=0), seconds=10)
            comm.recv(source=0)
            time.sleep(0.1)
            comm.send(time.monotonic(), 0)
            optimizer.step()
            optimizer.step()


def test_frozen_parameters_that_follow_the_trained_ones_go_on_doing_so(comm):
    """As a momentum encoder does, which writes to `.data`."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)]).double()
    model[1].requires_grad_(False)
    sgd = torch.optim.SGD(model[0].parameters(), lr=1.0)
    settings = {"group_size": comm.size, "wait": "group", "include": "1"}
    with WAGMA(model, sgd, comm=comm, overlap=True, **settings) as averager:
        start = model[1].weight.item()
        for _ in range(8):
            averager.complete()
            model[1].weight.data.add_(1 + comm.rank)
            sgd.step()
        averager.complete()
        np.testing.assert_allclose(model[1].weight.item(), start + 8 * (1 + mean_of(comm)))


def test_models_of_several_dtypes_and_weighed_steps(comm):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for part, dtype in zip(model, (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        part.to(dtype)
    with training(model, comm, wait="group", group_size=comm.size) as (optimizer, averager):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(comm.rank)
        averager.weight = comm.rank
        optimizer.step()
        averager.complete()
        assert averager.result.weight == 6
        for parameter in model.parameters():
            torch.testing.assert_close(
                parameter.double(), torch.full_like(parameter, 14 / 6).double(), rtol=1e-2, atol=0
            )


# What follows a step


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize(
    "follow",
    [
        *("complete", "synchronize", "join", "state_dict", "close", "exit"),
    ],
)
def test_what_follows_has_the_outstanding_average_in_the_model(comm, late, follow):
    model, optimizer, averager = scalar(comm, late=late)
    optimizer.step()
    assert averager.result is None and model.weight.item() == comm.rank
    if follow == "join":
        with averager.join():
            pass
    elif follow == "exit":
        with averager:
            pass
    else:
        state = getattr(averager, follow)()
        assert follow != "state_dict" or state["version"] == 1
    assert model.weight.item() == mean_of(comm)
    assert averager.result.version == 0 and averager.result.weight == comm.size
    assert averager.closed == (follow in ("close", "exit")) == (not averager.flat.vectors)
    averager.complete()
    averager.close()
    assert model.weight.item() == mean_of(comm)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
def test_averaged_shows_the_outstanding_average_and_leaves_it_to_the_next_step(comm, late):
    model, optimizer, averager = scalar(comm, late=late, group_size=1)
    with averager:
        optimizer.step()
        for _ in range(2):
            with averager.averaged():
                np.testing.assert_allclose(model.weight.item(), mean_of(comm))
            assert model.weight.item() == comm.rank
    model, optimizer, averager = scalar(comm, late=late)
    with averager:
        optimizer.step()
        with pytest.raises(KeyError), averager.averaged():
            nn.init.zeros_(model.weight)
            raise KeyError
        assert model.weight.item() == comm.rank
        optimizer.step()
        np.testing.assert_allclose(model.weight.item(), mean_of(comm))
        assert [result.version for result in averager.results] == [0]


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
def test_training_continues_exactly_from_what_was_saved(comm, late):
    settings = {"wait": "group", "late": late, "sync_period": 5}
    uninterrupted = make_model(comm.rank)
    with training(uninterrupted, comm, **settings) as (optimizer, averager):
        for step in range(13):
            if step == 7:
                saved = checkpoint(uninterrupted, optimizer, averager)
            backward(uninterrupted, comm.rank, step)
            optimizer.step()

    model = make_model(17 + comm.rank)
    with training(model, comm, **settings) as (optimizer, averager):
        backward(model, comm.rank, 99)
        optimizer.step()  # whose average is not to come into what is loaded
        restore(saved, model, optimizer, averager)
        for step in range(7, 13):
            backward(model, comm.rank, step)
            optimizer.step()
    for one, other in zip(model.state_dict().values(), uninterrupted.state_dict().values()):
        assert torch.equal(one, other)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_ranks_with_fewer_steps_join(comm, late, wait):
    model = make_model(comm.rank)
    with training(model, comm, late=late, wait=wait, sync_period=6) as (optimizer, averager):
        with averager.join():
            for step in range([0, 9, 4, 13][comm.rank]):
                backward(model, comm.rank, step)
                optimizer.step()
        most = [0, 9, 4, 13][: comm.size]
        assert averager.collective.version == max(most)
        assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        assert np.isfinite(floats(model)).all()


def test_a_closure_sees_the_average(comm):
    model, optimizer, averager = scalar(comm)
    seen = []
    with averager:
        for _ in range(2):
            assert optimizer.step(lambda: seen.append(model.weight.item()) or 3) == 3
    assert seen == [comm.rank, mean_of(comm)]


def test_a_step_that_grad_scaler_skips_takes_the_average_and_is_a_version(comm):
    model, optimizer, averager = scalar(comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    expected = float(comm.rank)
    with averager:
        for step in range(4):
            optimizer.zero_grad()
            skips = step == 2 and comm.rank == 1
            scaler.scale(model.weight.sum() * (torch.inf if skips else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            expected = np.mean(comm.allgather(expected)) if step else expected
            expected -= not skips
            np.testing.assert_allclose(model.weight.item(), expected)
        assert averager.collective.version in (3, 4)
        averager.complete()
        assert averager.collective.version == 4


# Ranks that are late


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_ranks_agree_after_every_synchronization_whoever_is_slow(comm, late):
    random = np.random.default_rng(comm.rank)
    model = make_model(comm.rank)
    synchronized, timely = 0, []
    with training(model, comm, late=late, sync_period=5) as (optimizer, averager):
        for step in range(17):
            backward(model, comm.rank, step)
            time.sleep(random.uniform(0, 0.004) if comm.rank else 0.008)
            optimizer.step()
            timely += [result.timely for result in averager.results]
            if (step + 1) % 5 == 0:
                synchronized += 1
                assert averager.result.synchronized and averager.result.version == step
                assert same_everywhere(comm, averager.flat.vectors[0].tobytes())
        averager.complete()
        assert len(timely) == 16 and synchronized == 3
        assert averager.collective.statistics().calls == 17
    assert not all(map(all, comm.allgather(timely)))
    assert np.isfinite(floats(model)).all()


# When something is wrong


@before_transports
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("everywhere", "here", "kind", "message"),
    [
        ("yes", "yes", TypeError, "overlap must be True or False, not 'yes'"),
        (True, 1, TypeError, "overlap must be True or False, not 1"),
        (True, False, ValueError, "overlap differs between ranks: True on ranks 0-2; False on ran"),
    ],
)
def test_a_wrong_argument_raises_on_every_rank(comm, everywhere, here, kind, message):
    if comm.size == 1 and kind is ValueError:
        return
    model = make_model()
    overlap = here if comm.rank == comm.size - 1 else everywhere
    with pytest.raises(kind, match=message) as raised:
        WAGMA(model, OPTIMIZERS["sgd"](model.parameters()), comm=comm, overlap=overlap)
    assert same_everywhere(comm, str(raised.value))


@pytest.mark.ranks(1, 4)
def test_a_change_that_the_average_would_undo_is_refused(comm):
    model, optimizer, averager = scalar(comm)
    with averager:
        optimizer.step()
        with torch.no_grad():
            model.weight += 1
        for use in (
            optimizer.step,
            averager.complete,
            averager.state_dict,
            averager.synchronize,
            averager.averaged().__enter__,
        ):
            with pytest.raises(RuntimeError, match=r"'weight' was changed outside step\(\) while"):
                use()
        assert model.weight.item() == comm.rank + 1
        averager.load_state_dict({"version": 1})
        optimizer.step()
        averager.complete()
        assert model.weight.item() == mean_of(comm) + 1
        with torch.no_grad():
            model.weight += 1
        optimizer.register_step_post_hook(lambda *_: nn.init.constant_(model.weight, comm.rank))
        optimizer.step()
        averager.complete()
        assert model.weight.item() == mean_of(comm)
        optimizer.step()
        nn.init.constant_(model.weight, 17.0)
    assert model.weight.item() == 17
    assert averager.state_dict()["version"] == 4


def test_replaced_memory_is_noticed(comm):
    model, optimizer, averager = scalar(comm)
    with averager:
        optimizer.step()
        model.double()
        for use in (optimizer.step, averager.synchronize, averager.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"'weight' was replaced"):
                use()


def test_a_model_that_is_not_finite_gets_the_others_average(comm):
    model = nn.BatchNorm1d(2, affine=True)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"wait": "group", "group_size": 4, "late": "paper"}
    with WAGMA(model, sgd, comm=comm, overlap=True, **settings) as averager:
        with torch.no_grad():
            for value in (model.weight, model.running_mean):
                value.fill_(torch.nan if comm.rank == 3 else comm.rank)
        sgd.step()
        model.running_mean.add_(comm.rank)
        averager.complete()
        assert averager.result.timely == (comm.rank != 3) and averager.result.weight == 3
        assert model.weight.tolist() == [1, 1]
        # A third of an average is a rank's, and so it has this part of what follows.
        learnt = comm.rank / 3 if comm.rank < 3 else 0
        np.testing.assert_allclose(model.running_mean, 1 + learnt)


def test_another_ranks_error_reaches_those_with_a_call_outstanding(comm):
    model, optimizer, averager = scalar(comm)
    if comm.rank == 2:
        with pytest.raises(KeyError, match="mine"), averager:
            optimizer.step()
            raise KeyError("mine")
    else:
        with pytest.raises(RankFailedError, match="rank 2 failed.* KeyError: 'mine'"), averager:
            for _ in range(100_000):
                optimizer.step()
                time.sleep(0.001)
    assert averager.closed and not averager.flat.vectors
    assert np.isfinite(model.weight.item())


def test_an_exception_on_every_rank_closes_with_the_average_in_the_model(comm):
    model, optimizer, averager = scalar(comm)
    with pytest.raises(KeyError), averager:
        optimizer.step()
        comm.Barrier()
        raise KeyError
    assert averager.closed and not averager.flat.vectors
    assert model.weight.item() == mean_of(comm)


@pytest.mark.parametrize("late", RULES)
def test_an_interrupted_wait_leaves_the_ranks_own_model_and_the_next_step_works(comm, late):
    model, optimizer, averager = scalar(comm, late=late)
    with averager:
        if comm.rank == 0:
            optimizer.step()
            with interrupted():
                optimizer.step()
            assert model.weight.item() == 0
        comm.Barrier()
        if comm.rank:
            optimizer.step()
        optimizer.step()
        averager.synchronize()
        assert same_everywhere(comm, model.weight.item())
        assert averager.collective.version == 2
        if late == "conserving":
            np.testing.assert_allclose(model.weight.item(), mean_of(comm))


def test_steps_and_operations_are_refused_inside_averaged_and_after_close(comm):
    _, optimizer, averager = scalar(comm)
    optimizer.step()
    with averager.averaged():
        for use in (optimizer.step, averager.synchronize):
            with pytest.raises(RuntimeError, match="inside averaged"):
                use()
        assert averager.state_dict()["version"] == 1
    averager.close()
    with pytest.raises(RuntimeError, match="closed"):
        averager.step()
