"""WP-SGD on the ranks of a job: the weighted reduction, and who stops whom."""

import time
from dataclasses import replace

import numpy as np
import pytest
from together import assert_equal_everywhere, same_everywhere

from collectives import GroupAllreduce
from wagma.simulation import FREE
from wagma.wpsgd import weights
from wagma.wpsgd.methods import METHODS
from wagma.wpsgd.modelled import Modelled
from wagma.wpsgd.ranks import Ranks
from wagma.wpsgd.samples import Order, generate
from wagma.wpsgd.training import Problem, run

pytestmark = pytest.mark.mpi
ONE = pytest.mark.transports("messages")  # it makes no difference
SAMPLES = generate(400, 300, 10, seed=1)
PROBLEM = Problem(SAMPLES, SAMPLES, start=5.0, lr=0.1, l2=0.01, span=50)


@pytest.fixture
def team(comm):
    """Return a function that makes a team, which is closed in the end."""
    made = []

    def make(name, problem=PROBLEM, **options):
        made.append(Ranks(METHODS[name], problem, comm, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.ranks(3, 4, 8)
def test_an_average_may_have_weights_of_its_own(comm):
    delays = 1000 * np.arange(comm.size)
    q = weights(delays, 0.999)
    models = np.random.default_rng(0).normal(size=(comm.size, 1000))
    mine = models[comm.rank].copy()
    with GroupAllreduce(comm, np.zeros(1000), group_size=1, wait="group") as reduction:
        reduction.average(mine, weight=q[comm.rank])
        assert_equal_everywhere(comm, mine)
        np.testing.assert_allclose(mine, q @ models, rtol=1e-12, atol=1e-15)
        plain = models[comm.rank].copy()
        reduction.average(plain)  # that of its last call, of which there is none
        np.testing.assert_allclose(plain, models.mean(axis=0), rtol=1e-12, atol=1e-15)


@pytest.mark.ranks(3, 4, 8)
def test_ranks_weigh_by_how_far_they_are_behind(comm, team):
    made = team("wp", seed=7)
    count = 300 - 20 * ((comm.rank + 1) % comm.size)
    made.steps.advance(Order(np.arange(400), [7, comm.rank]).take(count))
    model = made.model()
    assert_equal_everywhere(comm, model)
    models = np.array(comm.allgather(made.steps.model()))
    delays = 300 - np.array(comm.allgather(count))
    assert delays[-1] == 0
    np.testing.assert_allclose(model, weights(delays, 0.999) @ models, rtol=1e-12, atol=1e-12)


@ONE
@pytest.mark.ranks(3, 4, 8)
def test_the_first_to_have_consumed_its_samples_stops_the_others(comm, team):
    slow = comm.rank == 1
    made = team("wp", factor=100.0 if slow else 1.0, sample_seconds=1e-4)
    points = list(run(made.method, made, 50, 300, 200))
    consumed = comm.allgather(made.steps.consumed)
    assert max(consumed) == 300
    assert consumed[1] < 300
    assert [point.samples for point in points] == [200, 300]
    assert same_everywhere(comm, tuple(point.seconds for point in points))
    assert min(point.seconds for point in points) > 0.015
    assert np.isfinite(points[1].objective) == (comm.rank == 0)


@ONE
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", ["simuparallel", "minibatch"])
def test_ranks_that_wait_consume_as_many_and_make_the_modelled_steps(comm, team, name):
    made = team(name, factor=3.0 if comm.rank == 2 else 1.0, seed=5)
    list(run(made.method, made, 50, 60, 60))
    assert made.steps.consumed == 60
    modelled = Modelled(made.method, PROBLEM, [1.0] * comm.size, FREE)
    modelled._orders = [Order(np.arange(400), [5, rank]) for rank in range(comm.size)]
    list(run(made.method, modelled, 50, 60, 60))
    np.testing.assert_allclose(made.model(), modelled.model(), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(4)
def test_ranks_go_on_from_the_average_after_a_span(comm, team):
    made = team("delay-wp", sample_seconds=2e-5)
    list(run(made.method, made, 50, 100, 100))
    assert_equal_everywhere(comm, made.steps.model())
    updates = made.updates()
    assert updates.abandoned == 0 and updates.applied >= 100


@ONE
@pytest.mark.ranks(4)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", ["delay", "delay-wp"])
def test_workers_are_threads_and_what_they_did_is_counted_on_all_ranks(comm, team, name, check):
    problem, factor = replace(PROBLEM, check=check), 8.0 if comm.rank == 1 else 1.0
    made = team(name, problem, factor=factor, sample_seconds=1e-4)
    list(run(made.method, made, 50, 210, 100))
    consumed = comm.allgather(made.steps.consumed)
    assert max(consumed) == 210 and consumed[1] < 210
    updates = made.updates()
    assert updates.applied + updates.abandoned == updates.late.sum() == sum(consumed)
    assert updates.applied > 0 and updates.longest > 0
    assert (updates.abandoned > 0) == check
    totals = updates.applied, updates.abandoned, updates.longest, *updates.late.tolist()
    assert same_everywhere(comm, totals)
    since = np.array(comm.allgather(made.steps.applied - made._applied))
    assert made.delays().tolist() == (since.max() - since).tolist()
    assert (name == "delay") == (made._applied == 0)
    # The order goes on where it was when others stopped this rank.
    following = Order(np.arange(400), [0, comm.rank])
    following.take(made.steps.consumed)
    assert made._order.take(400).tolist() == following.take(400).tolist()


@ONE
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["wp", "delay"])
def test_the_first_does_not_wait_for_samples_that_take_long(comm, team, name):
    """Rank 1 takes 4 s for a sample, and is in the midst of one when the others are done."""
    made = team(name, factor=200.0 if comm.rank == 1 else 1.0, sample_seconds=0.02)
    comm.Barrier()
    began = time.perf_counter()
    made.advance(26)
    elapsed = time.perf_counter() - began
    consumed = comm.allgather(made.steps.consumed)
    assert consumed[0] == 26 or consumed[2] == 26
    assert consumed[1] <= 4
    assert elapsed < 3 and (elapsed > 0.45 or made.steps.consumed < 26)
    assert made.consumed() == consumed
    model = made.model()
    assert_equal_everywhere(comm, model)
    delays = max(comm.allgather(made.steps.applied)) - np.array(comm.allgather(made.steps.applied))
    assert made.weighing.delays.tolist() == delays.tolist()
    assert made.weighing.weights.tolist() == weights(delays, PROBLEM.r).tolist()


@ONE
@pytest.mark.ranks(3)
def test_the_time_of_a_sample_that_was_cut_short_is_paid_later(comm, team):
    """Spans of 2 samples, of which the slow rank completes one in 4 spans."""
    made = team("wp", factor=8.0 if comm.rank == 1 else 1.0, sample_seconds=0.01)
    began = time.perf_counter()
    for samples in range(2, 34, 2):
        made.advance(samples)
    consumed = comm.allgather(made.steps.consumed)
    assert max(consumed) >= 32
    assert consumed[1] <= 2 + (time.perf_counter() - began) / 0.08


@ONE
@pytest.mark.ranks(3)
@pytest.mark.parametrize("total", [False, True])
def test_delays_are_those_of_a_span_or_of_the_run(comm, team, total):
    made = team("delay-wp", replace(PROBLEM, total_delays=total), sample_seconds=1e-5)
    list(run(made.method, made, 50, 100, 100))
    applied = np.array(comm.allgather(made.steps.applied))
    expected = applied.max() - applied if total else np.zeros(3)
    assert made.delays().tolist() == expected.tolist()


@ONE
@pytest.mark.ranks(3)
def test_one_rank_alone_is_sequential_sgd(comm, team):
    made = team("sequential", trains=comm.rank == 1, seed=9)
    (point,) = run(made.method, made, 50, 200, 200)
    assert comm.allgather(made.steps.consumed) == [0, 200, 0]
    expected = PROBLEM.steps(made.method)
    expected.advance(Order(np.arange(400), [9, 1]).take(200))
    np.testing.assert_allclose(made.model(), expected.model(), rtol=1e-12, atol=1e-15)
    if comm.rank == 0:
        assert point.objective == pytest.approx(PROBLEM.objective(expected.model()))


@ONE
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["wp", "simuparallel", "delay", "minibatch", "sequential"])
def test_all_stop_when_one_is_asked_to(comm, team, name):
    made = team(name, sample_seconds=1e-4, trains=name != "sequential" or comm.rank == 0)
    made._asked = lambda: comm.rank == 2 and (made.steps.consumed >= 32 or name == "sequential")
    points = list(run(made.method, made, 50, 10**6, 10**6))
    assert made.stopped and len(points) == 1
    assert max(comm.allgather(made.steps.consumed)) < 100_000
    assert_equal_everywhere(comm, made.model())
