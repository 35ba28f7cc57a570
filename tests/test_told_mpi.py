"""What ranks tell each other with the operations that they make anyway."""

import numpy as np
import pytest
from together import NEVER

from collectives import GroupAllreduce, TriggeredAverage
from wagma.report.exchanged import TOLD, Exchange

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3, 4)]

COUNT = 5


def numbers_of(rank, call):
    return 1000.0 * rank + call + np.arange(COUNT) / 7


def tell(native, numbers):
    """Tell them, as soon as the engine is not at work."""
    while not native.tell(numbers):
        pass


def heard(native, known, size):
    """Return what all ranks have told since, as soon as the engine is not at work."""
    found = None
    while found is None:
        found = native.told(known)
    number, told = found
    return number, np.frombuffer(told).reshape(size, COUNT)


@pytest.mark.parametrize("engine", ("adaptive", "none"))
def test_all_ranks_are_told_with_every_average_over_all_of_them(comm, engine):
    mine, calls = np.zeros(1000), 12
    with GroupAllreduce(comm, mine, group_size=1, sync_period=4, engine=engine) as average:
        native, known = average.native, 0
        native.tell_with_operations(COUNT)
        for call in range(calls):
            tell(native, numbers_of(comm.rank, call))
            average(mine)
            if call % 4 == 3:
                known, told = heard(native, known, comm.size)
                expected = [numbers_of(rank, call) for rank in range(comm.size)]
                np.testing.assert_array_equal(told, expected)
            assert native.told(known) is None
        assert known == calls // 4


def test_averages_are_the_same_with_and_without_it(comm):
    found = []
    for tells in (False, True):
        mine = np.full(1000, float(comm.rank))
        with GroupAllreduce(comm, mine, group_size=1, sync_period=2) as average:
            if tells:
                average.native.tell_with_operations(COUNT)
            for call in range(4):
                mine += comm.rank * call
                average(mine)
            average.synchronize(mine)
            found.append((mine.tobytes(), average.statistics().bytes_sent))
    assert found[0] == found[1]


def test_ranks_that_join_are_told_too(comm):
    """All make different numbers of calls, and what each told last counts."""
    mine = np.zeros(10)
    with GroupAllreduce(comm, mine, group_size=1, sync_period=100) as average:
        average.native.tell_with_operations(COUNT)
        for call in range(comm.rank + 1):
            average(mine)
            tell(average.native, numbers_of(comm.rank, call))
        with average.joining(mine):
            pass
        _, told = heard(average.native, 0, comm.size)
        np.testing.assert_array_equal(told, [numbers_of(rank, rank) for rank in range(comm.size)])


def test_an_average_that_a_rank_triggers_tells_too(comm):
    mine = np.zeros(10)
    with TriggeredAverage(comm, mine, sync_period=NEVER) as average:
        average.native.tell_with_operations(COUNT)
        tell(average.native, numbers_of(comm.rank, 0))
        average.synchronize(mine)
        known, told = heard(average.native, 0, comm.size)
        assert known == 1
        np.testing.assert_array_equal(told, [numbers_of(rank, 0) for rank in range(comm.size)])


def test_wrong_numbers_are_refused(comm):
    with GroupAllreduce(comm, np.zeros(10), group_size=1) as average:
        for count in (0, 17):
            with pytest.raises(ValueError, match=f"count is {count}, not from 1 to 16"):
                average.native.tell_with_operations(count)
        average.native.tell_with_operations(COUNT)
        with pytest.raises(ValueError, match="3 numbers are told, not 5"):
            average.native.tell(np.zeros(3))


def test_statistics_of_all_ranks_arrive_on_one(comm):
    mine = np.zeros(10)
    with GroupAllreduce(comm, mine, group_size=1, sync_period=2) as average:
        exchange = Exchange(average.native, [*range(comm.size)] if comm.rank == 0 else [])
        record = dict.fromkeys(TOLD, 0.0) | {"work": None}
        for step in range(8):
            average(mine)
            exchange.add(record | {"compute_s": comm.rank + 1.0, "elapsed_s": 10.0 * (step + 1)})
            tell(average.native, exchange._own)
            while step % 2 and not exchange.look():
                pass
        found = exchange.recorded(None, {})
        if comm.rank == 0:
            recorded, steps = found
            assert (steps, recorded.counts) == (2.0, comm.size * (3,))
            own = [recorded.own(rank).tolist() for rank in range(comm.size)]
            assert recorded.column("compute_s").tolist() == 3 * [list(range(1, comm.size + 1))]
            assert own == comm.size * [[10.0] * 3]
        else:
            assert found is None
