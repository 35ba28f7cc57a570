"""DropCompute: micro-batches not begun in time are left out, the mean is over those computed."""

import itertools
import json

import numpy as np
import pytest
import torch
from methods import bits_of, opened
from mpi4py import MPI
from together import same_everywhere
from torch import nn
from trainings import digits_task, equal, job, settings

from wagma.arguments import positive
from wagma.cli import main
from wagma.evaluation import evaluate
from wagma.job import meet
from wagma.methods import METHODS
from wagma.optim import Allreduce
from wagma.simulation import FREE, Settings, simulate
from wagma.simulation.learning import learn
from wagma.simulation.steps import begun_within
from wagma.trainer import Trainer

ALONE = MPI.COMM_SELF
LABEL = "allreduce:compute_limit=1.0"


def training(model, comm=ALONE, limit=1.0, pace=0.3):
    """Return a block of an optimizer and its averager, whose clock advances when it is read."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = Allreduce(model, optimizer, comm=comm, compute_limit=limit)
    ticks = itertools.count()
    averager._clock = lambda: pace * next(ticks)
    return opened(averager)


def linear():
    """Return a model whose gradient is the input, if the output is the loss."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def accumulate(averager, model, batches):
    model.zero_grad()
    for batch in averager.within_limit(batches):
        model(batch).sum().backward()


BATCHES = torch.tensor([[8.0, 0.0], [0.0, 4.0], [4.0, 8.0], [-4.0, 0.0], [2.0, 16.0]]).double()


@pytest.mark.parametrize(
    ("pace", "computed"), [(0.0, 5), (0.24, 5), (0.25, 4), (0.3, 4), (0.5, 2), (1.0, 1), (9.0, 1)]
)
def test_the_gradient_is_the_mean_of_the_micro_batches_begun_in_time(pace, computed):
    model = linear()
    with training(model, pace=pace) as (optimizer, averager):
        for step in (1, 2):
            accumulate(averager, model, BATCHES)
            assert averager.computed == computed
            optimizer.step()
            torch.testing.assert_close(model.weight.grad[0], BATCHES[:computed].mean(0))
            assert averager.left_out == step * (5 - computed)
        assert averager.report() == {"left_out_of_rank": 2 * (5 - computed)}
        assert averager.settings == {"compute_limit": 1.0}


def test_without_a_limit_none_is_left_out_and_the_mean_is_taken_all_the_same():
    model = linear()
    with training(model, limit=None, pace=1e9) as (optimizer, averager):
        accumulate(averager, model, BATCHES)
        optimizer.step()
        torch.testing.assert_close(model.weight.grad[0], BATCHES.mean(0))
        assert averager.report() == {}
        model.weight.grad.fill_(3.0)
        optimizer.step()  # nothing was accumulated by it
        assert model.weight.grad.tolist() == [[3.0, 3.0]]


def test_real_time_counts():
    model = linear()
    with Allreduce(model, comm=ALONE, compute_limit=1e-9) as averager:
        accumulate(averager, model, BATCHES)
        assert averager.computed == 1


@pytest.mark.parametrize(
    ("limit", "kind", "message"),
    [
        (0, ValueError, "compute_limit is 0, not above 0"),
        (-1.0, ValueError, "compute_limit is -1, not between 0 and"),
        (float("nan"), ValueError, "compute_limit is nan"),
        ("1", TypeError, "compute_limit is a str, not a number"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(limit, kind, message):
    with pytest.raises(kind, match=message):
        training(linear(), limit=limit)


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_a_limit_is_the_same_on_all_ranks(comm):
    with pytest.raises(ValueError, match="compute_limit"):
        training(linear(), comm, limit=1.0 + comm.rank)


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_ranks_have_the_mean_of_all_micro_batches_computed(comm):
    """Rank r computes 4 / 2**r of 4 micro-batches, the last rank none: all sums are exact."""
    size, rank = comm.size, comm.rank
    pace = [0.1, 0.5, 2.0, 2.0][rank]
    counts = [*[4, 2, 1][: size - 1], 0]
    model = linear()
    batches = [
        [84 * torch.tensor([[4.0 * r + k, k - r]]).double() for k in range(4)] for r in range(size)
    ]
    with training(model, comm, pace=pace) as (optimizer, averager):
        expected = torch.zeros(1, 2).double()
        for step in range(3):
            accumulate(averager, model, batches[rank] if rank < size - 1 else [])
            assert averager.computed == counts[rank]
            optimizer.step()
            made = [batch for of, count in zip(batches, counts) for batch in of[:count]]
            expected -= torch.cat(made).sum(0) / len(made)
            assert torch.equal(model.weight.detach(), expected), step
            assert averager.result.weight == len(made)
            assert same_everywhere(comm, bits_of(model))


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_a_slow_rank_is_cut_and_all_have_the_same_model(comm):
    """Its trainer is held up at each of 4 batches; the others compute all."""
    slow = comm.size - 1
    own = settings(
        "allreduce:compute_limit=0.3", 3, accumulate=4, step_time_ms=20.0, slow_rank={slow: 40.0}
    )
    trainer = Trainer(own, digits_task(), comm)
    with trainer.averager as averager:
        samples = sum(record["samples"] for record in trainer.steps())
        left_out = comm.allgather(averager.left_out)
        assert max(left_out[:slow]) < left_out[slow] <= 9
        assert samples == 8 * (12 - left_out[comm.rank])
        assert same_everywhere(comm, bits_of(trainer.model))


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
def test_the_simulated_training_has_the_bits_of_the_real_one(comm):
    """The real ranks' clocks show what the simulated ones' do."""
    torch.set_num_threads(1)
    given = {"accumulate": 3}
    of = job(comm.size, 20, spread=0.6)
    trainer = Trainer(settings(LABEL, 20, **given), digits_task(), comm)
    counts = begun_within(1.0, of.step_times, 3)[0][:, comm.rank]
    # A step reads the clock before each part, until one does not begin.
    read = zip(of.step_times[:, comm.rank], np.minimum(counts + 1, 3))
    now = iter([k / 3 * seconds for seconds, times in read for k in range(times)])
    trainer.averager._clock = lambda: next(now)
    losses = []
    for record, count in zip(trainer.steps(), counts, strict=True):
        losses.append(record["loss"])
        assert record["samples"] == 8 * count
    left_out = comm.allgather(trainer.averager.left_out)
    state, _ = evaluate(trainer)
    trainer.averager.close()
    losses = comm.allgather(losses)
    if comm.rank == 0:
        learned = learn(settings(LABEL, 20, **given), digits_task(), of, batched=False)
        assert learned.losses == losses
        assert equal(learned.state, state)
        assert learned.summary["left_out_of_rank"] == left_out
        assert 0 < sum(left_out) < 3 * 20 * comm.size
    meet(comm)


# In simulated time


def test_parts_of_a_step_begin_one_after_another():
    times = np.array([[1.0, 4.0, 5.0, 100.0, 0.0]])
    begun, cut = begun_within(1.0, times, 4)
    assert begun.tolist() == [[4, 1, 1, 1, 4]]
    assert cut.tolist() == [[1.0, 1.0, 1.25, 25.0, 0.0]]
    begun, cut = begun_within(2.5, times, 4)
    assert begun.tolist() == [[4, 3, 2, 1, 4]]
    assert cut.tolist() == [[1.0, 3.0, 2.5, 25.0, 0.0]]
    begun, cut = begun_within(None, times, 4)
    assert (begun == 4).all() and cut is times


def test_a_step_ends_with_the_slowest_ranks_last_part():
    times = np.ones((10, 4))
    times[:, 3] = 4.0
    options = {"accumulate": 8, "compute_limit": 1.0}
    result = simulate("allreduce", times, FREE, Settings(1, **options))
    assert result.wall == 10 * 1.0
    assert result.left_out_share == 6 / 8 / 4
    assert result.compute.tolist() == [10.0] * 4
    for method, given in (("allreduce", {"accumulate": 8}), ("d-psgd", options)):
        result = simulate(method, times, FREE, Settings(1, **given))
        assert result.wall == 40.0 and result.left_out_share == 0
    result = simulate("allreduce", times, FREE, Settings(1, **options), 5.0)
    assert result.made.tolist() == [5] * 4 and result.left_out_share == 6 / 8 / 4


def test_gradients_computed_at_once_are_those_computed_one_by_one():
    of = job(4, 8, spread=0.6)
    task = digits_task()._replace(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    one, at_once = (
        learn(settings(LABEL, 8, accumulate=3), task, of, batched=batched)
        for batched in (False, True)
    )
    assert one.summary["left_out_of_rank"] == at_once.summary["left_out_of_rank"]
    assert any(one.summary["left_out_of_rank"])
    np.testing.assert_allclose(one.losses, at_once.losses, rtol=1e-4)
    for name, value in one.state.items():
        torch.testing.assert_close(at_once.state[name], value, rtol=1e-4, atol=1e-5)


def test_a_limit_that_nothing_exceeds_learns_what_is_learned_without_one():
    of = job(4, 8)
    plain, limited = (
        learn(settings(label, 8, accumulate=4), digits_task(), of, batched=False)
        for label in ("allreduce", "allreduce:compute_limit=9")
    )
    assert not any(limited.summary["left_out_of_rank"])
    assert plain.summary["wall_s"] == limited.summary["wall_s"]
    for name, value in plain.state.items():
        torch.testing.assert_close(limited.state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [("--steps", "20"), ("--seconds", "30")])
def test_the_command_says_what_was_left_out(length, tmp_path, capsys):
    label = "allreduce:compute_limit=0.6"
    options = ["--ranks", "8", "--slow-rank", "3:4", "--step-times", "constant", *length]
    options += ["--algorithms", f"allreduce,{label}", "--accumulate", "8", "--name", "mine"]
    assert main(["simulate", *options, "--runs-dir", str(tmp_path)]) == 0
    plain, limited = (
        line for line in capsys.readouterr().out.splitlines() if line.split()[1].startswith("allr")
    )
    assert limited.endswith("   7.8% of the batches left out") and "left out" not in plain
    assert float(plain.split()[5][:-1]) > float(limited.split()[5][:-1])  # idle
    results = json.loads((tmp_path / "mine" / "simulation.json").read_text())["results"]
    assert results[label][0]["left_out_share"] == 5 / 8 / 8
    assert results[label][0]["steps_per_s"] / results["allreduce"][0]["steps_per_s"] > 2.5


def test_the_option_is_a_number_above_zero():
    assert METHODS["allreduce"].given(["compute_limit=0.2"]) == {"compute_limit": 0.2}
    assert METHODS["allreduce"].option("compute_limit").convert is positive
