"""Versions that wait for their groups: nothing is kept of what a rank gives, and it counts once."""

import functools
import time

import ml_dtypes
import numpy as np
import pytest
from together import (
    NEVER,
    RULES,
    bytes_of,
    group_mean,
    interrupt_in_the_middle,
    interrupted,
    wait_until,
)

from collectives import GroupAllreduce
from collectives.topology import shuffle

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("late", RULES)]


def waiting(comm, like, late, **settings):
    settings = {"group_size": comm.size, "sync_period": NEVER, **settings}
    return GroupAllreduce(comm, like, wait="group", late=late, **settings)


# What counts


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("before", ["nothing", "call", "synchronize", "load", "publish"])
def test_a_rank_that_closes_early_contributes_nothing(comm, late, before):
    """But for what it published and no version has had yet."""
    like = np.full(3, float(comm.rank))
    mine = like.copy()
    average = waiting(comm, like, late)
    if before == "call":
        assert average(mine).weight == comm.size
    elif before == "synchronize":
        average.synchronize(mine)
    elif before == "load":
        average.load(mine, 7)
    elif before == "publish":
        average.publish(mine)
    if comm.rank:
        for t in range(3):
            mine[:] = comm.rank
            result = average(mine)
            counts = before == "publish" and t == 0
            assert result.weight == comm.size - 1 + counts
            assert result.group == tuple(range(comm.size))
            if late == "paper" or before in ("nothing", "load"):
                np.testing.assert_allclose(mine, np.mean(range(not counts, comm.size)))
            assert len(set(mine)) == 1
    average.close()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("length", [3, 300_000])
@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_vector_that_is_not_finite_contributes_nothing(comm, late, length, synchronizes):
    """Not what its rank gave before, either."""
    mine = np.full(length, float(comm.rank))
    with waiting(comm, np.zeros(length), late) as average:
        assert average(mine).weight == comm.size
        if synchronizes:
            average.synchronize(mine)
        for count in (1, 2):
            mine[:] = np.nan if comm.rank == 0 else comm.rank
            shown = mine.copy()
            average.average(shown)
            np.testing.assert_allclose(shown, comm.size / 2)
            result = average(mine)
            assert (result.weight, result.timely) == (comm.size - 1, comm.rank > 0)
            np.testing.assert_allclose(mine, comm.size / 2)
            assert average.statistics().left_out == (count if comm.rank == 0 else 0)
        mine += comm.rank
        result = average(mine)
        assert (result.weight, result.timely) == (comm.size, True)
        np.testing.assert_allclose(mine, comm.size - 0.5)
        mine[:] = np.nan if comm.rank == 0 else comm.rank
        average.synchronize(mine)
        np.testing.assert_allclose(mine, comm.size / 2)


@pytest.mark.ranks(3, 4)
def test_who_joins_with_a_vector_that_is_not_finite_contributes_nothing(comm, late):
    mine = np.full(3, float(comm.rank))
    with waiting(comm, mine, late) as average:
        average(mine)
        if comm.rank == 0:
            mine[1] = np.nan
        else:
            for _ in range(3):
                mine[:] = comm.rank
                assert average(mine).weight == comm.size - 1
        average.join(mine)
        np.testing.assert_allclose(mine, comm.size / 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [3, 300_000])
def test_where_no_vector_is_finite_any_longer_each_rank_keeps_its_own(comm, late, length):
    mine = np.full(length, float(comm.rank))
    with waiting(comm, mine, late) as average:
        average(mine)
        mine[:] = comm.rank
        mine[1] = np.nan
        given = mine.copy()
        for _ in range(2):
            assert average(mine).weight == 0
            assert mine.tobytes() == given.tobytes()
        mine[1] = comm.rank
        assert average(mine).weight == 4
        np.testing.assert_array_equal(mine, 1.5)


@pytest.mark.ranks(4)
def test_where_all_weights_are_0_each_rank_keeps_its_own(comm, late):
    length = 400_000
    mine = np.full(length, float(comm.rank))
    with waiting(comm, mine, late) as average:
        assert average(mine, weight=0).weight == 0
        assert (mine == comm.rank).all()
        mine += 1
        assert average(mine).weight == comm.size
        np.testing.assert_array_equal(mine, 2.5)


# Long vectors, whose blocks go through a ring many times


@functools.cache
def many_arrays(rank, t):
    """Arrays of all dtypes, whose ends are in the middle of blocks, of 2.6 MB."""
    values = np.random.default_rng((rank, t)).standard_normal(350_001)
    halves = [values[:300_007].astype(np.float16), values[:9].astype(ml_dtypes.bfloat16)]
    return [*halves, values.astype(np.float32), values[:70_003]]


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.transports("shared")
@pytest.mark.parametrize("group_size", [2, 3, 100])
def test_both_transports_average_alike_bit_for_bit(comm, late, group_size):
    """The mean of the group, with pauses that let ranks come in any order."""
    group_size = min(group_size, comm.size)
    chance = np.random.default_rng(comm.rank)
    like = many_arrays(comm.rank, 0)
    settings = {"group_size": group_size, "sync_period": 4}
    with (
        waiting(comm, like, late, transport="shared", **settings) as shared,
        waiting(comm, like, late, transport="messages", **settings) as messages,
    ):
        for t in range(5):
            weight = float(1 + (comm.rank + t) % 3)
            given = many_arrays(comm.rank, t)
            mine = [array.copy() for array in given]
            time.sleep(chance.random() * 1e-3)
            result = shared(mine, weight=weight)
            other = [array.copy() for array in given]
            assert messages(other, weight=weight).weight == result.weight
            assert bytes_of(mine) == bytes_of(other)
            if comm.size < 8 and not result.synchronized:
                members = shuffle(comm.size, group_size).members(comm.rank, t)
                vectors = [many_arrays(rank, t) for rank in members]
                weights = [float(1 + (rank + t) % 3) for rank in members]
                assert bytes_of(mine) == bytes_of(group_mean(vectors, weights))


# What an exception interrupts


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [3, 1_000_000])
def test_the_vector_of_a_call_that_was_interrupted_counts_once(comm, late, length):
    """Rank 0 is interrupted while it waits for the others, and closes."""
    mine = np.full(length, float(comm.rank))
    average = waiting(comm, mine, late)
    if comm.rank == 0:
        with interrupted():
            average(mine)
        mine[:] = 1e9
        request = comm.Ibarrier()
    else:
        comm.Ibarrier().Wait()
        for weight, mean in ((4, 1.5), (3, 1.5 + 2)):
            assert average(mine).weight == weight
            np.testing.assert_array_equal(mine, mean)
            mine += comm.rank
    average.close()
    if comm.rank == 0:
        request.Wait()
        assert (mine == 1e9).all()


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("through_memory")
def test_who_is_interrupted_in_the_middle_goes_on_with_all_that_there_is(comm, late):
    """Rank 1 stops in the middle of an exchange, and rank 0 is interrupted there.

    Under the conserving rule no update is lost, and none counted twice.
    """
    mine = [np.zeros(2_000_000), np.zeros(2_000_000, np.float32)]

    def add(change):
        for array in mine:
            array += change

    def prepare():
        for array in mine:
            array[:] = (0, 3, 9, 12)[comm.rank]

    with waiting(comm, mine, late) as average:
        average(mine)
        attempts = interrupt_in_the_middle(comm, prepare, lambda: average(mine), mine)
        if comm.rank == 0:
            assert any(array.any() for array in mine)
            left = [array.copy() for array in mine]
            wait_until(lambda: average.executed == 1 + attempts)
            assert bytes_of(mine) == bytes_of(left)
            add(4)
        else:
            for array in mine:
                np.testing.assert_array_equal(array, 6)
        average(mine)
        for array in mine:
            assert ((array == 7) | (array == 5.5) & (late == "paper")).all()
        shown = [array.copy() for array in mine]
        average.average(shown)
        assert bytes_of(shown) == bytes_of(mine)
        add(comm.rank)
        average.join(mine)
        for array, before in zip(mine, shown):
            np.testing.assert_array_equal(array, before + 1.5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("length", "period"), [(3, NEVER), (300_000, 2)])
def test_a_synchronization_that_was_interrupted_averages_what_was_given(comm, late, length, period):
    """Rank 0 is interrupted while it waits for the others in it, and goes on."""
    mine = np.full(length, float(comm.rank))
    with waiting(comm, mine, late, sync_period=period) as average:
        synchronize = average if period == 2 else average.synchronize
        average(mine)
        mine += 4 if comm.rank == 0 else 0
        if comm.rank == 0:
            with interrupted():
                synchronize(mine)
            np.testing.assert_array_equal(mine, 5.5)
            comm.Ibarrier().Wait()
        else:
            comm.Ibarrier().Wait()
            synchronize(mine)
            np.testing.assert_array_equal(mine, 2.5)
        mine += 8 if comm.rank == 0 else 0
        assert average(mine).weight == 4
        np.testing.assert_array_equal(mine, 4.5 if late == "conserving" else 5.25)
