"""GroupAllreduce under mpiexec: what it averages, with whom, and whom it waits for."""

import random
import time

import numpy as np
import pytest
from together import NEVER, RULES, assert_equal_everywhere, compute_until, vector_of

from collectives import GroupAllreduce
from collectives.topology import group_of, groups

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 1000, 300_001])
def test_a_group_of_all_ranks_gets_the_mean_bitwise_equal(comm, late, dtype, length):
    mine = vector_of(comm.rank, 0, length, dtype)
    expected = np.mean([vector_of(r, 0, length, dtype) for r in range(comm.size)], 0)
    with GroupAllreduce(
        comm, np.zeros(length, dtype), group_size=comm.size, wait="group", late=late
    ) as average:
        result = average(mine)
        assert_equal_everywhere(comm, mine)
    np.testing.assert_allclose(
        mine, expected, rtol=1e-5 if dtype is np.float32 else 1e-12, atol=1e-6
    )
    assert (result.version, result.source, result.timely) == (0, 0, True)
    assert (result.group, result.weight) == (tuple(range(comm.size)), comm.size)
    assert not result.synchronized


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_waiting_for_the_group_is_model_averaging_in_that_versions_group(comm, late, group_size):
    group_size, sync_period, steps, length = min(group_size, comm.size), 5, 13, 50
    models = np.zeros((comm.size, length))
    mine = models[comm.rank].copy()
    with GroupAllreduce(
        comm, mine, group_size=group_size, sync_period=sync_period, wait="group", late=late
    ) as average:
        for t in range(steps):
            mine += vector_of(comm.rank, t, length)
            models += [vector_of(r, t, length) for r in range(comm.size)]
            synchronous = (t + 1) % sync_period == 0
            everyone = [tuple(range(comm.size))]
            for members in everyone if synchronous else groups(comm.size, group_size, t):
                models[list(members)] = models[list(members)].mean(0)
            result = average(mine)
            assert result.synchronized == synchronous
            group = everyone[0] if synchronous else group_of(comm.rank, comm.size, group_size, t)
            assert result.group == group
            np.testing.assert_allclose(mine, models[comm.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("wait", ["group", "nobody"])
def test_fixed_groups_are_those_of_version_0_and_meet_at_synchronizations_alone(comm, wait):
    """What a rank puts in is one in its own place: the others' places say who has been met."""
    size, mine = comm.size, np.zeros(comm.size)
    group = group_of(comm.rank, size, 2, 0)
    outside = [rank for rank in range(size) if rank not in group]
    generator = np.random.default_rng(comm.rank)
    with GroupAllreduce(
        comm, mine, group_size=2, sync_period=7, groups="fixed", wait=wait
    ) as average:
        assert average.groups == "fixed"
        for t in range(21):
            mine[comm.rank] += 1
            if wait == "nobody":
                time.sleep(0.004 * generator.random())
            before = mine[outside].copy()
            result = average(mine)
            assert result.group == (tuple(range(size)) if result.synchronized else group)
            if result.synchronized:
                np.testing.assert_allclose(mine, (t + 1) / size, rtol=1e-12)
            elif len(group) == 2:
                assert np.all(mine[list(group)] > 0) or wait == "nobody"
                assert np.ptp(mine[outside]) < 1e-12 and np.allclose(mine[outside], before)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_waiting_for_the_group_is_bitwise_repeatable(comm, late):
    def run():
        chance = random.Random(time.perf_counter_ns())
        mine = np.zeros(100)
        with GroupAllreduce(
            comm, mine, group_size=2, sync_period=4, wait="group", late=late
        ) as average:
            for t in range(10):
                mine += vector_of(comm.rank, t, 100)
                time.sleep(chance.random() * 0.003)
                average(mine)
        return mine.tobytes()

    assert run() == run()


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
def test_after_every_synchronization_all_ranks_are_bitwise_equal(comm, late):
    chance = random.Random(comm.rank)
    mine = np.zeros(1000, np.float32)
    with GroupAllreduce(
        comm, mine, group_size=(comm.size + 1) // 2, sync_period=4, late=late
    ) as average:
        for t in range(40):
            mine += vector_of(comm.rank, t, 1000, np.float32)
            time.sleep(chance.random() * 0.002)
            result = average(mine)
            assert result.synchronized == (t % 4 == 3)
            if result.synchronized:
                assert_equal_everywhere(comm, mine)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("late", RULES)
def test_synchronize_and_average_between_two_calls(comm, late):
    mine = np.full(3, float(comm.rank))
    mean = np.mean(range(comm.size))
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER, late=late) as average:
        average(mine)
        copy = mine.copy()
        average.average(copy)
        np.testing.assert_allclose(copy, mean)
        np.testing.assert_array_equal(mine, comm.rank)
        mine += 1
        average.synchronize(mine)
        np.testing.assert_allclose(mine, mean + 1)
        assert_equal_everywhere(comm, mine)
        assert average.version == 1


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("broken", [False, True])
def test_average_shows_what_synchronize_would_give(comm, late, broken):
    chance = random.Random(comm.rank)
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, late=late) as average:
        for t in range(10):
            mine += vector_of(comm.rank, t, 3)
            time.sleep(chance.random() * 0.002)
            average(mine)
        mine += 1
        if broken and comm.rank == 0:
            mine[1] = np.nan
        shown = mine.copy()
        average.average(shown)
        average.synchronize(mine)
        np.testing.assert_array_equal(shown, mine)
        assert np.isfinite(shown).all()


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
def test_no_call_waits_for_a_rank_that_computes(comm, late):
    stopped = comm.size - 1
    mine = np.full(10_000, float(comm.rank))
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, late=late) as average:
        for _ in range(50 * (comm.rank != stopped)):
            average(mine)
        compute_until(comm, everybody_else_is_done=comm.rank != stopped)
        assert average.version == (0 if comm.rank == stopped else 50)


@pytest.mark.ranks(4)
def test_without_a_progress_thread_calls_still_complete(comm, monkeypatch):
    monkeypatch.setenv("WAGMA_ENGINE", "none")
    mine = np.zeros(100)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=5) as average:
        for _ in range(25):
            mine += 1
            average(mine)
        np.testing.assert_allclose(mine, 25)


@pytest.mark.ranks(4)
def test_several_collectives_are_served_at_once(comm):
    with (
        GroupAllreduce(comm, np.zeros(3), group_size=2, sync_period=5) as first,
        GroupAllreduce(comm, np.zeros(7), group_size=4, sync_period=3) as second,
    ):
        a, b = np.zeros(3), np.zeros(7)
        for _ in range(15):
            a += 1
            b += 2
            first(a)
            second(b)
        np.testing.assert_allclose(a, 15)
        np.testing.assert_allclose(b, 30)
