"""Collectives whose ranks send each other vectors, on ranks in simulated time."""

import contextlib
import dataclasses
import math
import re

import numpy as np
import pytest
from bits import CASES, digest, expected
from trainings import digits_task, equal, job, settings

import collectives
from collectives import (
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PushSum,
    QueuedNeighborAverage,
)
from wagma.simulation import FREE, MACHINES, Settings, peer_methods
from wagma.simulation.core import Simulation
from wagma.simulation.learning import learn
from wagma.simulation.ranks import Job, Ranks, TimeIsOver

PEERS = "(neighbors|push-sum|server|asynchronous server|pairs)"
TRAININGS = "(DPSGD|SGP|ParameterServer|ADPSGD)"
PLAYED = [name for name in CASES if re.match(rf"{PEERS}|train {TRAININGS}", name)]
# Passes over vectors take time as well, and so does their way to an accelerator.
MACHINE = dataclasses.replace(MACHINES["10gbe"], memory=1e8, staging=5e7)
LENGTH = 1000

KINDS = {
    "d_psgd": NeighborAverage,
    "hop": QueuedNeighborAverage,
    "sgp": PushSum,
    "ad_psgd": PairwiseAverage,
    "parameter_server": ParameterServer,
}
RUNS = [
    ("d_psgd", {}),
    ("d_psgd", {"clock": "global"}),
    ("sgp", {}),
    ("sgp", {"neighbors": 2}),
    ("ad_psgd", {}),
    ("parameter_server", {"mode": "bsp"}),
    ("parameter_server", {"mode": "backup", "backups": 2}),
    ("parameter_server", {"mode": "asp"}),
    ("parameter_server", {"mode": "hete"}),
    ("parameter_server", {"mode": "ringmaster", "max_age": 3}),
    ("parameter_server", {"mode": "async-local"}),
    ("hop", {}),
    ("hop", {"order": "serial"}),
    ("hop", {"mode": "notify-ack"}),
    ("hop", {"backup": 1}),
    ("hop", {"staleness": 2}),
    ("hop", {"staleness": 2, "backup": 1, "mean": "simple"}),
    ("hop", {"backup": 1, "max_skip": 3}),
]
each_run = pytest.mark.parametrize(("name", "options"), RUNS)


def uneven(count, ranks, seed=0):
    """Return seconds of steps, of which those of rank 1 are the longest."""
    times = np.random.default_rng(seed).uniform(0.5, 1.5, (count, ranks))
    times[:, 1] *= 4
    return times


def play(function, steps, machine=MACHINE):
    return Ranks(Job(machine, steps)).run(function)


def called(name, options, calls):
    """Return a function that calls, and returns when each call had ended, with its iteration."""

    def function(comm):
        vector = np.full(LENGTH, comm.rank, np.float32)
        ended = []
        with KINDS[name](comm, vector, **options) as peers:
            while peers.version < calls:
                comm.ranks.compute(comm.rank)
                vector += 1
                peers(vector)
                ended.append((comm.ranks.now(), peers.version))
        return ended

    return function


def without_values(name, options):
    return getattr(peer_methods, name)(Settings(4 * LENGTH, local_steps=1, **options), 8)


# Bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 4) for name in PLAYED), *((name, 8) for name in sorted(PLAYED)[::3])],
)
def test_the_bits_are_the_fixtures(name, size, monkeypatch):
    monkeypatch.setenv("WAGMA_TRANSPORT", "messages")
    machine = FREE if size == 8 else MACHINES["hdr"]
    played = play(lambda comm: digest(name, comm), np.ones((1, size)), machine)
    assert played == [expected(size, name, "messages", rank) for rank in range(size)]


def test_all_cases_of_peers_are_played():
    assert len(PLAYED) == 26


# Times


class Applications:
    """Ranks that call after each step, without vectors, and note when each call has ended."""

    def __init__(self, method, steps, calls):
        self.calls = calls
        self.ended = [[] for _ in steps[0]]
        self.simulation = Simulation(method, MACHINE, steps, None, self)
        for rank in range(len(self.ended)):
            self.simulation.compute(rank)
        self.simulation.run()

    def computed(self, rank):
        self.simulation.call(rank)

    def returned(self, rank):
        iteration = self.simulation.method.protocol(rank).calls
        self.ended[rank].append((self.simulation.now, iteration))
        if iteration < self.calls:
            self.simulation.compute(rank)
            return
        self.simulation.method.leave(rank)
        self.simulation.finish(rank)


@each_run
def test_calls_take_the_time_that_they_take_without_values(name, options):
    steps = uneven(20, 8)
    without = Applications(without_values(name, options), steps, 20).ended
    assert play(called(name, options, 20), steps) == without


@each_run
def test_a_simulation_without_values_ends_at_the_same_time(name, options):
    steps = uneven(20, 8)
    plain = Simulation(without_values(name, options), MACHINE, steps, None)
    plain.run()
    ended = [times[-1][0] for times in play(called(name, options, 20), steps)]
    # A rank leaves a little earlier where no training is behind it.
    np.testing.assert_allclose(ended, plain.ended, rtol=1e-3)


def test_skipped_iterations_are_counted():
    def function(comm):
        vector = np.zeros(LENGTH)
        calls = 0
        with QueuedNeighborAverage(comm, vector, backup=1, max_skip=3) as hop:
            while hop.version < 30:
                comm.ranks.compute(comm.rank)
                assert hop(vector).version < hop.version
                calls += 1
                assert hop.version == calls + hop.skipped
            return hop.skipped, hop.statistics().calls, calls

    played = play(function, uneven(30, 8))
    assert [rank for rank, (skipped, *_) in enumerate(played) if skipped] == [1]
    assert all(counted == calls for _, counted, calls in played)


# Values


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "asp"},
        {"mode": "hete"},
        {"mode": "backup", "backups": 3},
        {"mode": "ringmaster"},
        {"mode": "ringmaster", "max_age": 1},
    ],
)
def test_a_server_adds_what_arrives_when_it_arrives(given):
    """Where communication takes no time, changes are added in the order of the calls."""
    ranks, calls = 4, 12
    steps = uneven(calls, ranks)
    mode, counted = given["mode"], ranks - given.get("backups", 0)
    # One change ends a round of "backup" here; others made on its model are dropped.
    oldest = {"backup": 1, "ringmaster": given.get("max_age", ranks)}.get(mode, math.inf)

    def change(rank, t):
        return 4.0 ** (rank - 2) * (t + 1)

    def function(comm):
        vector = np.zeros(3)
        returned = []
        with ParameterServer(comm, vector, **given) as server:
            for t in range(calls):
                comm.ranks.compute(comm.rank)
                vector += change(comm.rank, t)
                server(vector)
                returned.append(vector[0])
            return returned

    job = Ranks(Job(FREE, steps))
    played = job.run(function)
    model, version, dropped = 0.0, 0, 0
    held = [0] * ranks
    expected_of = [[] for _ in range(ranks)]
    order = sorted((steps[: t + 1, r].sum(), r, t) for r in range(ranks) for t in range(calls))
    for _, rank, t in order:
        age = version - held[rank]
        if age < oldest:
            model += change(rank, t) / counted / (1 + age // ranks if mode == "hete" else 1)
            version += 1
        else:
            dropped += 1
        held[rank] = version
        expected_of[rank].append(model)
    np.testing.assert_allclose(played, expected_of, rtol=1e-12)
    assert job.simulation.method.protocol(0).dropped == dropped
    assert bool(dropped) == (oldest < math.inf)


def test_a_server_looks_ahead_when_as_many_changes_as_ranks_have_arrived():
    ranks, calls, steps = 4, 12, uneven(12, 4)

    def function(comm):
        vector = np.zeros(3)
        returned = []
        with ParameterServer(
            comm, vector, mode="async-local", outer_momentum=0.5, outer_rate=0.8
        ) as server:
            for t in range(calls):
                comm.ranks.compute(comm.rank)
                vector += comm.rank + t
                server(vector)
                returned.append(vector[0])
            return returned

    played = Ranks(Job(FREE, steps)).run(function)
    order = sorted((steps[: t + 1, r].sum(), r, t) for r in range(ranks) for t in range(calls))
    model, momentum, gathered = 0.0, 0.0, 0.0
    for count, (_, rank, t) in enumerate(order, 1):
        model += 0.8 * (rank + t) / ranks
        gathered += (rank + t) / ranks
        if count % ranks == 0:
            momentum, gathered = 0.5 * momentum + gathered, 0.0
            model += 0.8 * 0.5 * momentum
        assert played[rank][t] == pytest.approx(model, rel=1e-12)


def test_backups_leave_out_the_models_that_are_late():
    """Each call returns the mean of the models of the ranks in its result."""
    calls = 20

    def function(comm):
        vector = np.random.default_rng(comm.rank).normal(size=LENGTH)
        models, results = [vector.copy()], []
        with QueuedNeighborAverage(comm, vector, graph="ring-based", backup=1) as hop:
            for t in range(calls):
                comm.ranks.compute(comm.rank)
                vector += t
                results.append(hop(vector))
                models.append(vector.copy())
        return models, results

    played = play(function, uneven(calls, 8))
    groups = set()
    for models, results in played:
        for t, result in enumerate(results):
            mean = np.mean([played[member][0][t] for member in result.group], axis=0)
            np.testing.assert_allclose(models[t + 1], mean + t, rtol=1e-9, atol=1e-9)
            groups.add(len(result.group))
    assert len(groups) > 1


@pytest.mark.parametrize("mean", ["weighted", "simple"])
def test_stale_models_have_weights_that_add_up_to_one(mean):
    def function(comm):
        vector = np.zeros(comm.size)
        vector[comm.rank] = 1
        results = []
        with QueuedNeighborAverage(comm, vector, staleness=2, mean=mean) as hop:
            for _ in range(20):
                comm.ranks.compute(comm.rank)
                before = vector.copy()
                results.append((before, hop(vector), vector.copy()))
        return results

    for rank, results in enumerate(play(function, uneven(20, 8))):
        for before, result, after in results:
            assert after.sum() == pytest.approx(1) and (after >= 0).all()
            share = 3 / (3 * len(result.group)) if mean == "weighted" else 1 / len(result.group)
            assert after[rank] >= share * before[rank] - 1e-12


def test_pairs_keep_the_sum_of_all_models():
    def function(comm):
        vector = np.full(5, 4.0**comm.rank)
        with PairwiseAverage(comm, vector) as pairs:
            for _ in range(10):
                comm.ranks.compute(comm.rank)
                vector += comm.rank
                pairs(vector)
            shown = vector.copy()
            pairs.average(shown)
            averagings = pairs.statistics().versions
        return shown, averagings

    played = play(function, uneven(10, 8))
    total = sum(4.0**rank + 10 * rank for rank in range(8))
    for shown, averagings in played:
        np.testing.assert_allclose(shown, total / 8, rtol=1e-12)
        assert averagings > 0


def test_a_change_that_is_not_finite_is_left_out():
    def function(comm):
        vector = np.zeros(4)
        with ParameterServer(comm, vector) as server:
            for t in range(3):
                comm.ranks.compute(comm.rank)
                vector += np.nan if comm.rank == t + 1 else 4
                server(vector)
            return vector, server.statistics().left_out

    played = play(function, uneven(3, 4))
    assert [nonfinite for _, nonfinite in played] == [0, 1, 1, 1]
    for vector, _ in played:
        assert (vector == 9).all()


# Ranks that end


def test_a_call_that_waits_for_a_closed_rank_raises():
    def function(comm):
        vector = np.zeros(4)
        with NeighborAverage(comm, vector) as neighbors:
            for _ in range(3 + 2 * (comm.rank > 0)):
                comm.ranks.compute(comm.rank)
                neighbors(vector)

    with pytest.raises(collectives.ClosedError, match="waits in a call for rank 0, which has clo"):
        play(function, uneven(5, 4))


def test_a_call_that_waits_for_a_rank_in_an_operation_raises():
    def function(comm):
        vector = np.zeros(4)
        with NeighborAverage(comm, vector) as neighbors:
            for _ in range(3 + 2 * (comm.rank > 0)):
                comm.ranks.compute(comm.rank)
                neighbors(vector)
            neighbors.average(vector)

    with pytest.raises(collectives.DisagreementError, match="rank 0, which is in an operation"):
        play(function, uneven(5, 4))


def test_ranks_that_enter_different_operations_raise():
    def function(comm):
        vector = np.zeros(4)
        with NeighborAverage(comm, vector) as neighbors:
            (neighbors.average if comm.rank else neighbors.synchronize)(vector)

    with pytest.raises(collectives.DisagreementError, match="another operation"):
        play(function, np.ones((1, 4)))


@each_run
def test_trainings_end_with_the_time(name, options):
    def function(comm):
        vector = np.zeros(4)
        with KINDS[name](comm, vector, **options) as peers, contextlib.suppress(TimeIsOver):
            while not comm.ranks.over:
                comm.ranks.compute(comm.rank)
                peers(vector)
        assert comm.ranks.now() == 10
        return peers.statistics().calls

    played = Ranks(Job(MACHINE, uneven(100, 8), seconds=10.0)).run(function)
    assert 0 < min(played) <= max(played) < 20


@each_run
def test_no_operation_begins_after_the_end(name, options):
    def function(comm):
        vector = np.zeros(4)
        with KINDS[name](comm, vector, **options) as peers:
            with pytest.raises(TimeIsOver):
                comm.ranks.compute(comm.rank)
            with pytest.raises(TimeIsOver):
                peers.average(vector)

    Ranks(Job(MACHINE, uneven(100, 8), seconds=0.1)).run(function)


def test_a_job_has_collectives_of_one_kind():
    def function(comm):
        with NeighborAverage(comm, np.zeros(4)):
            collectives.GroupAllreduce(comm, np.zeros(4))

    with pytest.raises(NotImplementedError, match="one collective"):
        play(function, np.ones((1, 4)))


# Trainings


@pytest.mark.parametrize(
    "label",
    [
        "d-psgd",
        "sgp",
        "ad-psgd",
        "parameter-server:mode=hete",
        "parameter-server:mode=ringmaster",
        "parameter-server:mode=async-local:local_steps=2+3+1+2",
        "hop:staleness=2",
        "hop:backup=1",
    ],
)
def test_trainings_repeat_bit_for_bit(label):
    first, second = (learn(settings(label, 10), digits_task(), job(4, 10)) for _ in range(2))
    assert first.losses == second.losses
    assert equal(first.state, second.state)


def test_a_training_drops_the_updates_of_a_rank_that_is_too_slow():
    slow = job(4, 12)
    slow.step_times[:] = 1 + 0.01 * np.arange(4)
    slow.step_times[:, 1] = 3.5
    label = "parameter-server:mode=ringmaster:max_age=8"
    assert learn(settings(label, 12), digits_task(), slow).summary["dropped"] == 3
    slow.step_times[:, 1] = 2.0
    assert learn(settings(label, 12), digits_task(), slow).summary["dropped"] == 0


def test_ranks_train_by_themselves_between_two_updates_that_they_send():
    label = "parameter-server:mode=async-local:local_steps=4+1+4+4"
    slow = job(4, 12)
    slow.step_times[:, 1] *= 4
    learned = learn(settings(label, 12), digits_task(), slow)
    assert [len(losses) for losses in learned.losses] == [12] * 4
    assert learned.summary["dropped"] == 0


def test_ranks_measure_how_many_steps_they_make_in_the_time_of_the_fastest_one():
    label = "parameter-server:mode=async-local:local_steps=4:dynamic_steps"
    slow = job(4, 20)
    slow.step_times[:] = [1.0, 4.0, 1.0, 2.0]
    learned = learn(settings(label, 20), digits_task(), slow)
    versions = [[each["version"] for each in rank] for rank in learned.outcomes]
    # Steps from one update to the next: calls of the collective are numbered by what they send.
    made = [[rank.count(call) for call in range(max(rank) + 1)] for rank in versions]
    assert made[0][:4] == [4] * 4 and made[1][:4] == [4, 1, 1, 1] and made[3][:4] == [4, 2, 2, 2]


def test_a_training_skips_iterations():
    slow = job(8, 20)
    slow.step_times[:, 1] *= 4
    learned = learn(settings("hop:backup=1:max_skip=3", 20), digits_task(), slow)
    skipped = learned.summary["skipped_of_rank"]
    assert skipped[1] > 0
    assert [len(losses) for losses in learned.losses] == [20 - each for each in skipped]
