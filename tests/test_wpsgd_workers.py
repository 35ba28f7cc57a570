"""A node's workers as threads: nothing lost, nothing twice, and what happened is counted."""

import threading
import time

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random

from wagma.wpsgd.samples import Order, generate, of_matrix
from wagma.wpsgd.steps import Steps
from wagma.wpsgd.workers import Workers

SEEDS = range(5)
ETA = 2.0**-30  # so small that all margins stay below 1, and a power of 2
GENERATED = generate(2000, 300, 10, seed=3)


def whole_numbers(rows, features, seed):
    """Return samples of which sums of updates are exact, in whatever order they are added."""
    generator = np.random.default_rng(seed)
    matrix = random(rows, features, 0.2, "csr", np.float64, generator)
    matrix.data = generator.integers(1, 4, matrix.nnz).astype(np.float64)
    return of_matrix(matrix, generator.choice([-1.0, 1.0], rows))


def one_feature_each(rows, seed):
    """Return samples that no two share a feature of: which are in a model can be seen."""
    labels = np.random.default_rng(seed).choice([-1.0, 1.0], rows)
    return of_matrix(csr_matrix((np.ones(rows), (np.arange(rows), np.arange(rows)))), labels)


@pytest.fixture
def threads():
    """Return a function that makes threads, which end with the test."""
    made = []

    def make(steps, *pace):
        made.append(Workers(steps, *pace))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("wagma-worker")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("workers", [2, 3])
def test_every_sample_is_consumed_once_and_no_update_is_torn(threads, workers, seed):
    samples = whole_numbers(20_000, 40, seed)
    rows = np.random.default_rng(seed).permutation(20_000)
    steps = Steps(samples, np.zeros(40), ETA, 0.0, workers=workers)
    node = threads(steps)
    assert [node.consume(part) for part in np.split(rows, [10, 10, 9000])] == [10, 0, 8990, 11_000]
    assert (steps.consumed, steps.applied, steps.abandoned) == (20_000, 20_000, 0)
    assert steps.delays.sum() == 20_000
    assert (steps.model() == ETA * (samples.labels @ samples.matrix)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_check_abandons_whole_updates(threads, seed):
    samples = one_feature_each(4000, seed)
    steps = Steps(samples, np.full(4000, -0.5), 0.01, 0.0, workers=2, check=True)
    node = threads(steps)
    assert node.consume(np.arange(2000)) == 2000
    paced = threads(steps, 1.0, 1e-4)  # so that some are late
    assert paced.consume(np.arange(2000, 4000)) == 2000
    assert steps.applied + steps.abandoned == steps.delays.sum() == 4000
    assert steps.applied >= steps.delays[0]  # Check accepts those that are not late
    assert steps.delays[0] < 4000 and (steps.longest > 0) == (steps.delays[1:].sum() > 0)
    moved = steps.model() + 0.5
    assert np.count_nonzero(moved) == steps.applied
    changed = moved[moved != 0]
    np.testing.assert_allclose(changed, 0.01 * samples.labels[moved != 0], rtol=1e-9)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_result_is_near_the_sequential_one(threads, check, seed):
    rows = np.random.default_rng(seed).integers(2000, size=30_000)
    start = np.full(300, 3.0)
    alone = Steps(GENERATED, start, 0.05, 0.01)
    alone.advance(rows)
    steps = Steps(GENERATED, start, 0.05, 0.01, workers=2, check=check)
    threads(steps).consume(rows)
    assert steps.consumed == steps.applied + steps.abandoned == 30_000
    assert (steps.abandoned == 0) or check
    expected, found = (GENERATED.objective(each.model(), 0.01) for each in (alone, steps))
    assert abs(found - expected) < 0.05 * expected
    apart = np.linalg.norm(steps.model() - alone.model())
    assert apart < 0.35 * np.linalg.norm(alone.model())


def test_one_thread_alone_makes_the_same_steps(threads):
    rows = np.random.default_rng(0).integers(2000, size=1000)
    alone, steps = (Steps(GENERATED, np.ones(300), 0.05, 0.01) for _ in range(2))
    alone.advance(rows)
    threads(steps).consume(rows)
    assert (steps.model() == alone.model()).all()
    assert steps.delays.tolist() == alone.delays.tolist() == [1000] + 64 * [0]


def test_workers_that_take_turns_are_late_by_as_many_as_there_are_others():
    steps = Steps(GENERATED, np.ones(300), 0.05, 0.01, workers=4)
    steps.advance(np.arange(103))
    assert steps.delays[:5].tolist() == [1, 1, 1, 97, 0] and steps.longest == 3
    with pytest.raises(RuntimeError, match="take turns have updates that they have not pushed"):
        steps.begin(np.arange(3))


def test_a_slow_node_takes_its_time_and_others_push_meanwhile(threads):
    steps = Steps(GENERATED, np.ones(300), 0.05, 0.01, workers=2)
    node = threads(steps, 3.0, 2e-4)
    began = time.perf_counter()
    node.consume(np.arange(60))
    node.consume(np.arange(60, 120))
    assert time.perf_counter() - began > 0.9 * 120 * 3 * 2e-4
    assert steps.delays[1:].sum() > 0 and steps.longest < 120


def test_what_is_not_consumed_comes_next(threads):
    samples = one_feature_each(50_000, 1)
    steps = Steps(samples, np.zeros(50_000), ETA, 0.0, workers=2)
    node, order = threads(steps, 1.0, 1e-4), Order(np.arange(50_000), seed=4)
    rows = order.peek(50_000)

    def reached(count):
        return lambda: steps.consumed >= count

    for part in (1, 2):
        order.take(node.consume(order.peek(25_000), stop=reached(100 * part)))
        assert 100 * part <= steps.consumed == steps.applied < 50_000
        expected = np.zeros(50_000)
        expected[rows[: steps.consumed]] = ETA * samples.labels[rows[: steps.consumed]]
        assert (steps.model() == expected).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_of_the_caller_s_ends_all_threads(threads, error):
    steps = Steps(GENERATED, np.zeros(300), 0.05, 0.01, workers=2)
    node = threads(steps, 1.0, 1e-5)

    def stop():
        raise error("here")

    with pytest.raises(error, match="here"):
        node.consume(np.zeros(1_000_000, np.int64), stop)
    consumed = steps.consumed
    assert consumed == steps.applied < 1_000_000
    assert node.consume(np.arange(2000)) == 2000 and steps.consumed == consumed + 2000


class Failing:
    """Steps of which a worker fails."""

    def __init__(self, steps):
        self.steps, self.workers = steps, steps.workers

    def __getattr__(self, name):
        return getattr(self.steps, name)

    def work(self, worker, *pace):
        if worker == 1:
            raise MemoryError("no more")
        self.steps.work(worker, *pace)


def test_a_worker_s_exception_ends_the_others_and_is_raised(threads):
    steps = Steps(GENERATED, np.zeros(300), 0.05, 0.01, workers=3)
    with pytest.raises(MemoryError, match="no more"):
        threads(Failing(steps), 1.0, 1e-5).consume(np.zeros(1_000_000, np.int64))
    assert steps.consumed == steps.applied < 1_000_000


def test_workers_and_rows_that_are_not_there_are_refused(threads):
    steps = Steps(GENERATED, np.zeros(300), 0.05, 0.01, workers=2)
    with pytest.raises(IndexError, match="from 0 to 2000, but must be at least 0 and below 2000"):
        threads(steps).consume(np.arange(2001))
    for worker in (-1, 2):
        with pytest.raises(IndexError, match=f"no worker {worker} among 2"):
            steps.work(worker)
