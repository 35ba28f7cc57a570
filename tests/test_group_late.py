"""GroupAllreduce where ranks are late: what they contribute meanwhile, and what they get."""

import random
import time

import numpy as np
import pytest
from together import NEVER, RULES, vector_of

from collectives import GroupAllreduce

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(3, 4, 8)
def test_conserving_loses_no_update_and_counts_none_twice(comm):
    chance = random.Random(comm.rank)
    mine = np.zeros(10)
    added = np.zeros(10)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=7, late="conserving") as average:
        timely = 0
        for t in range(70):
            change = vector_of(comm.rank, t, 10)
            mine += change
            added += change
            time.sleep(chance.random() * 0.002 * (1 + 4 * (comm.rank == 0)))
            result = average(mine)
            timely += result.timely
            if result.synchronized:
                np.testing.assert_allclose(mine, comm.allreduce(added) / comm.size, atol=1e-12)
    # The test says nothing unless many were late.
    assert comm.allreduce(timely) < 70 * comm.size


@pytest.mark.ranks(3, 4)
def test_vectors_are_never_torn_and_timely_means_present(comm):
    """Part r of the vector is what rank r contributes: t + 1 in its own call t, else older."""
    calls, width = 1500, 64
    chance = random.Random(comm.rank)
    before = np.zeros(comm.size * width)
    seen = set()
    with GroupAllreduce(
        comm, before, group_size=comm.size, sync_period=NEVER, late="paper"
    ) as average:
        for t in range(calls):
            mine = np.zeros(comm.size * width)
            mine[comm.rank * width : (comm.rank + 1) * width] = t + 1
            if chance.random() < 0.3:
                time.sleep(chance.random() * 3e-4)
            result = average(mine)
            seen.add(result.timely)
            if result.timely:
                sums = (mine * comm.size).reshape(comm.size, width)
            else:
                own = np.zeros((comm.size, width))
                own[comm.rank] = t + 1
                sums = mine.reshape(comm.size, width) * (comm.size + 1) - own
            sums = np.rint(sums)
            assert (sums == sums[:, :1]).all(), f"torn in call {t}"
            assert (sums[comm.rank, 0] == t + 1) == result.timely
            assert (result.source == t) or not result.timely
            assert result.source >= t
    assert set().union(*comm.allgather(seen)) == {True, False}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_a_late_rank_gets_what_the_rule_says(comm, late):
    """Rank 0 overtakes the others by one version; then they arrive, one after another."""
    like = np.full(5, 10.0 * comm.rank)
    mine = like + 1 + comm.rank
    contributed = [1.0, 10.0, 20.0, 30.0]
    mean = np.mean(contributed)
    with GroupAllreduce(comm, like, group_size=4, sync_period=NEVER, late=late) as average:
        if comm.rank == 0:
            result = average(mine)
            assert result.timely
            np.testing.assert_array_equal(mine, mean)
        comm.Barrier()
        if comm.rank > 0:
            result = average(mine)
            assert not result.timely
            assert (result.version, result.source) == (0, 0)
            x = 10.0 * comm.rank + 1 + comm.rank
            paper = (4 * mean + x) / 5
            conserving = mean + 1 + comm.rank
            np.testing.assert_allclose(mine, paper if late == "paper" else conserving)
        assert result.weight == 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_a_rank_that_is_several_versions_late_merges_the_newest_mean(comm, late):
    """In its next call it is late again, and merges, by the paper's rule, the very same mean."""
    like = np.full(5, 10.0 * comm.rank)
    mine = like.copy()
    with GroupAllreduce(comm, like, group_size=4, sync_period=NEVER, late=late) as average:
        if comm.rank == 0:
            for version in range(3):
                mine += 4
                assert average(mine).source == version
            newest = comm.bcast(mine[0], root=0)
        else:
            newest, own = comm.bcast(None, root=0), 10.0 * comm.rank
            for version in range(2):
                mine += 1
                result = average(mine)
                assert (result.version, result.source, result.timely) == (version, 2, False)
                own = (4 * newest + own + 1) / 5
                conserving = newest + 1 + version
                np.testing.assert_allclose(mine, own if late == "paper" else conserving)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("late", "continued", "end"), [("paper", 40 / 3, 38 / 3), ("conserving", 18, 15)]
)
def test_the_example_of_the_page_about_late_ranks(comm, late, continued, end):
    """Two pairs of ranks do the same; the second of each is late."""
    pair = comm.Split(comm.rank // 2)
    mine = np.full(1, 10.0)
    with GroupAllreduce(pair, mine, group_size=2, sync_period=2, late=late) as average:
        if pair.rank == 0:
            mine += 4
            average(mine)
            assert mine == 12
        comm.Barrier()
        if pair.rank == 1:
            mine += 6
            assert not average(mine).timely
            np.testing.assert_allclose(mine, continued)
        assert average(mine).synchronized
        np.testing.assert_allclose(mine, end)
    pair.Free()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_the_initial_vector_is_contributed_until_one_is_published(comm, late):
    like = np.full(3, float(comm.rank))
    with GroupAllreduce(comm, like, group_size=comm.size, sync_period=NEVER, late=late) as average:
        like[:] = np.nan  # it was copied
        if comm.rank == 0:
            mine = np.full(3, 100.0)
            average(mine)
            np.testing.assert_allclose(mine, (100 + sum(range(1, comm.size))) / comm.size)
        comm.Barrier()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_publish_replaces_what_is_contributed_without_taking_part(comm, late):
    with GroupAllreduce(
        comm, np.zeros(3), group_size=comm.size, sync_period=NEVER, late=late
    ) as average:
        average.publish(np.full(3, 7.0))
        assert average.version == 0
        comm.Barrier()
        if comm.rank == 0:
            mine = np.zeros(3)
            average(mine)
            np.testing.assert_allclose(mine, 7.0 * (comm.size - 1) / comm.size)
        comm.Barrier()


@pytest.mark.ranks(3, 4)
def test_under_conserving_publishing_loses_nothing(comm):
    chance = random.Random(comm.rank)
    mine = np.zeros(5)
    added = np.zeros(5)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, late="conserving") as average:
        for t in range(60):
            change = vector_of(comm.rank, t, 5)
            mine += change
            added += change
            time.sleep(chance.random() * 0.001)
            if chance.random() < 0.5:
                average.publish(mine)
                change = vector_of(comm.rank + comm.size, t, 5)
                mine += change
                added += change
            average(mine)
        average.synchronize(mine)
        np.testing.assert_allclose(mine, comm.allreduce(added) / comm.size, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_a_vector_that_was_returned_is_written_no_more(comm, late):
    """Rank 2 publishes while the others run versions, and keeps what its calls returned."""
    with GroupAllreduce(comm, np.zeros(50), group_size=2, sync_period=NEVER, late=late) as average:
        kept = []
        if comm.rank == 2:
            for t in range(200):
                returned = np.full(50, float(t))
                average(returned)
                kept.append((returned, returned.copy()))
                for _ in range(5):
                    average.publish(np.full(50, -1.0))
        else:
            for t in range(1000):
                average(np.full(50, float(t)))
        comm.Barrier()
        for returned, copy in kept:
            np.testing.assert_array_equal(returned, copy)
