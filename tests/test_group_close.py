"""How a GroupAllreduce ends, and what an interrupted call of it leaves."""

import numpy as np
import pytest
from together import NEVER, RULES, interrupted

from collectives import ClosedError, DisagreementError, GroupAllreduce

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("wait", ["nobody", "group"])
@pytest.mark.parametrize("group_size", [1, 2, 100])
def test_close_executes_what_anybody_started(comm, wait, group_size):
    mine = np.zeros(10)
    average = GroupAllreduce(
        comm, mine, group_size=min(group_size, comm.size), sync_period=NEVER, wait=wait
    )
    for _ in range(3 * comm.rank):
        average(mine)
    average.close()
    assert average.closed
    assert average.version == 3 * comm.rank
    assert average.executed == 3 * (comm.size - 1)
    average.close()
    with pytest.raises(ClosedError, match="closed"):
        average(mine)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_a_rank_that_waits_for_a_synchronization_is_told_who_closed(comm, wait):
    mine = np.zeros(10)
    average = GroupAllreduce(comm, mine, group_size=2, sync_period=5, wait=wait)
    for _ in range(2):
        average(mine)
    if comm.rank == 1:
        average.close()
    else:
        for _ in range(2):
            average(mine)
        with pytest.raises(ClosedError, match=r"rank 1 entered close\(\) after 2 calls"):
            average(mine)
        with pytest.raises(ClosedError, match="only close"):
            average(mine)
        average.close()
    assert average.executed == 4


@pytest.mark.ranks(4)
def test_ranks_in_different_operations_are_told_who_is_where(comm):
    mine = np.zeros(10)
    average = GroupAllreduce(comm, mine, group_size=2)
    operation = average.synchronize if comm.rank == 2 else average.average
    with pytest.raises(DisagreementError) as caught:
        operation(mine)
    what, others = "average()", "rank 2 entered synchronize()"
    if comm.rank == 2:
        what, others = "synchronize()", "ranks 0-1, 3 entered average()"
    assert f"rank {comm.rank} waits in {what} after 0 calls, which" in str(caught.value)
    assert f"but {others} after 0 calls" in str(caught.value)
    assert f"entered {what}" not in str(caught.value)
    average.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_an_interrupted_synchronization_hangs_nobody(comm, late):
    """Rank 0 is interrupted while it waits for the others, and closes; they go on, then close."""
    mine = np.full(10, float(comm.rank))
    average = GroupAllreduce(comm, mine, group_size=4, sync_period=3, late=late)
    if comm.rank == 0:
        average(mine)
        average(mine)
        with interrupted():
            average(mine)
        request = comm.Ibarrier()
    else:
        comm.Ibarrier().Wait()
        for _ in range(3):
            result = average(mine)
        assert result.synchronized
        assert np.isfinite(mine).all()
    average.close()
    if comm.rank == 0:
        request.Wait()
    assert average.executed == 3


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_calls_after_an_interrupted_one_take_part_in_their_own_versions(comm, late):
    """Rank 0 waits for its group and is interrupted in call 0; it goes on with calls 1 and 2."""
    mine = np.zeros(10)
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, wait="group", late=late
    ) as average:
        if comm.rank == 0:
            with interrupted():
                average(mine)
            comm.Ibarrier().Wait()
        else:
            comm.Ibarrier().Wait()
            average(mine)
        for t in (1, 2):
            mine[:] = comm.rank + t
            result = average(mine)
            assert (result.version, result.source, result.timely) == (t, t, True)
            if late == "paper":
                np.testing.assert_allclose(mine, np.mean(range(comm.size)) + t)


@pytest.mark.ranks(4)
def test_an_interrupted_close_can_be_repeated_and_allows_nothing_else(comm):
    mine = np.zeros(10)
    average = GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER)
    if comm.rank == 0:
        handle = average.start(mine)
        with interrupted():
            average.close()
        with pytest.raises(ClosedError):
            average(mine)
        assert handle.wait().version == 0
    comm.Barrier()
    average.close()
    assert average.closed


@pytest.mark.ranks(3, 4)
def test_an_interrupted_average_publishes_nothing(comm):
    """Rank 0's goes into that average, and into no version of the others."""
    mine = np.full(10, float(comm.rank + 1))
    average = GroupAllreduce(comm, mine, group_size=comm.size, sync_period=NEVER, wait="group")
    averaged = mine.copy()
    if comm.rank == 0:
        with interrupted():
            average.average(averaged)
        request = comm.Ibarrier()
        average.close()
        request.Wait()
        return
    comm.Ibarrier().Wait()
    average.average(averaged)
    np.testing.assert_allclose(averaged, (comm.size + 1) / 2)
    result = average(mine)
    assert result.weight == comm.size - 1
    np.testing.assert_allclose(mine, (comm.size + 2) / 2)
    average.close()
