"""GroupAllreduce of vectors that are not finite: they do not count, and harm no other."""

import numpy as np
import pytest
from together import NEVER, RULES

from collectives import GroupAllreduce

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_left_out(comm, value):
    good = np.full(4, 3.0)
    with GroupAllreduce(
        comm, good, group_size=comm.size, sync_period=NEVER, wait="group", late="paper"
    ) as average:
        mine = np.array([1.0, value, 1.0, 1.0]) if comm.rank == 0 else good.copy()
        result = average(mine)
        assert result.weight == comm.size - 1
        assert average.statistics().left_out == (comm.rank == 0)
        np.testing.assert_array_equal(mine, good if comm.size > 1 else [1.0, value, 1.0, 1.0])


@pytest.mark.ranks(4)
def test_under_conserving_a_change_that_is_not_finite_is_dropped(comm):
    mine = np.full(4, 3.0)
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=3, wait="group", late="conserving"
    ) as average:
        for _ in range(3):
            if comm.rank == 0:
                mine[0] = np.nan
            average(mine)
            np.testing.assert_array_equal(mine, 3.0)
        assert average.statistics().left_out == 3 * (comm.rank == 0)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_under_conserving_a_rank_that_starts_without_a_finite_vector_joins_the_mean(comm, wait):
    """Rank 1's initial vector is NaN: it is left out, takes the others' mean, and goes on."""
    like = np.full(4, np.nan if comm.rank == 1 else 10.0)
    with GroupAllreduce(
        comm, like, group_size=comm.size, sync_period=NEVER, wait=wait, late="conserving"
    ) as average:
        mine = like.copy()
        for t in range(3):
            if comm.rank != 1 and wait == "nobody":
                average(mine)
                np.testing.assert_array_equal(mine, 10.0)
            comm.Barrier()
            if comm.rank == 1 or wait == "group":
                result = average(mine)
                np.testing.assert_array_equal(mine, 10.0)
                assert not (result.timely and t == 0 and comm.rank == 1)
            comm.Barrier()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("late", RULES)
def test_where_no_vector_is_finite_each_rank_keeps_its_own(comm, late):
    mine = np.array([np.nan, float(comm.rank)])
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=2, wait="group", late=late
    ) as average:
        for synchronized in (False, True):
            result = average(mine)
            assert (result.weight, result.timely) == (0, False)
            assert result.synchronized == synchronized
            np.testing.assert_array_equal(mine, [np.nan, comm.rank])


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("how", ["average", "synchronize"])
def test_a_change_may_overflow_where_the_vector_does_not(comm, late, how):
    """The vector replaces what is still the initial one: no change is taken."""
    mine = np.full(4, 3e38, np.float32)
    with GroupAllreduce(comm, -mine, group_size=1, sync_period=NEVER, late=late) as average:
        getattr(average, how)(mine)
        np.testing.assert_allclose(mine, 3e38, rtol=1e-6)
        assert average.statistics().left_out == 0
