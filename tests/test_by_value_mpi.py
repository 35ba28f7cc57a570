"""Arrays averaged by value: nobody gets what is outside the range of values that ranks gave."""

from __future__ import annotations

import numpy as np
import pytest
from together import NEVER, before_transports, bytes_of, vector_of, wait_until

from collectives import GroupAllreduce

pytestmark = pytest.mark.mpi

# What ranks begin with, and what a late one gives: it changes by more than the mean will be.
BEGUN, LATE = 4.0, 0.25
each_length = pytest.mark.parametrize("length", [5, 70_000])


def two(length, value, dtype=np.float64):
    """Return two arrays: the first is averaged by changes, the second by value."""
    return [np.full(length, value, dtype) for _ in range(2)]


def fill(x, value):
    for array in x:
        array[:] = value


def assert_all(array, value):
    np.testing.assert_array_equal(array, np.full(array.size, value))


@pytest.mark.ranks(4)
@each_length
def test_a_late_rank_gets_its_own_values(comm, length):
    """Rank 0 overtakes the others by one version; by changes they get less than any rank gave."""
    x = two(length, BEGUN)
    with GroupAllreduce(comm, x, group_size=4, sync_period=NEVER, by_value=[1]) as average:
        if comm.rank == 0:
            fill(x, 0.5)
            assert average(x).timely
            assert_all(np.concatenate(x), 3.125)
        comm.Barrier()
        if comm.rank > 0:
            fill(x, LATE)
            assert not average(x).timely
            assert_all(x[0], 3.125 - (BEGUN - LATE))
            assert_all(x[1], LATE)
        average.average(x)
        assert_all(x[0], (0.5 + 3 * LATE) / 4)
        assert_all(x[1], (3.125 + 3 * LATE) / 4)


@pytest.mark.ranks(4)
@each_length
@pytest.mark.parametrize("options", [{}, {"every": {1: 2}}, {"only_all_ranks": [1]}], ids=str)
def test_a_rank_that_begins_late_at_its_own_pace(comm, length, options):
    """The sum by changes is conserved exactly: a version adds at most two bits to these numbers."""
    x = two(length, BEGUN)
    given, got, added = [BEGUN], [], BEGUN
    options = {"group_size": 2, "sync_period": 2, "pace": "own"} | options
    with GroupAllreduce(comm, x, by_value=[1], **options) as average:
        if late := comm.rank == 3:
            comm.Barrier()
            wait_until(lambda: average.executed >= 4)
        for call in range(1 if late else 4):
            given.append(LATE if late else 0.5 + call / 8 + comm.rank / 16)
            added += given[-1] - x[0][0]
            fill(x, given[-1])
            result = average(x)
            got += [x[1].min(), x[1].max()]
        if late:
            assert not result.timely
            assert (x[0] < LATE).all()
            assert_all(x[1], LATE)
        else:
            comm.Barrier()
        average.average(x)
        assert_all(x[0], sum(comm.allgather(added)) / 4)
        got += [x[1].min(), x[1].max()]
    low, high = min(comm.allgather(min(given))), max(comm.allgather(max(given)))
    assert low <= min(got) <= max(got) <= high


@pytest.mark.ranks(3, 4)
def test_timely_calls_have_the_same_bits(comm):
    ends, options = [], {"group_size": 2, "sync_period": 3, "wait": "group"}
    for by_value in ([], [1]):
        x = two(1000, 0)
        with GroupAllreduce(comm, x, by_value=by_value, **options) as average:
            for t in range(7):
                for index, array in enumerate(x):
                    array += vector_of(comm.rank, 2 * t + index, 1000)
                assert average(x).timely
            ends.append(bytes_of(x))
    assert ends[0] == ends[1]


@pytest.mark.ranks(4)
@each_length
def test_what_is_not_finite_leaves_all_arrays_out(comm, length):
    """A late rank gets the mean instead."""
    x = two(length, BEGUN)
    with GroupAllreduce(comm, x, group_size=4, sync_period=NEVER, by_value=[1]) as average:
        if comm.rank == 0:
            average(x)
        comm.Barrier()
        if comm.rank > 0:
            x[0] += 1
            x[1][-1] = np.nan if comm.rank == 1 else LATE
            average(x)
        assert average.statistics().left_out == (comm.rank == 1)
        assert_all(x[0], BEGUN + (comm.rank > 1))
        assert_all(x[1][-1:], LATE if comm.rank > 1 else BEGUN)


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
def test_they_are_sent_in_their_own_dtype(comm):
    """float16 has no number between −1 and 2⁻²⁰ − 1, the difference from what ranks began with."""
    x = two(1000, 1, np.float32)
    options = {"wait": "group", "wire_dtype": "float16"}
    with GroupAllreduce(comm, x, group_size=4, by_value=[1], **options) as average:
        fill(x, 2.0**-20)
        average(x)
    assert_all(x[0], 0)
    assert_all(x[1], 2.0**-20)


@before_transports
@pytest.mark.ranks(4)
def test_wrong_arguments(comm):
    for options, message in [
        ({"by_value": 1}, "by_value is 1, not a list of indices"),
        ({"by_value": ["1"]}, r"by_value is \['1'\], not a list of indices"),
        ({"by_value": [2]}, "there is no array 2 for by_value: 2 are"),
        ({"by_value": [-1]}, "there is no array -1 for by_value: 2 are"),
        ({"by_value": [1], "leased": [1], "pace": "own"}, "array 1 is in by_value and in leased"),
        ({"by_value": [comm.rank % 2]}, "by_value differs between ranks"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            GroupAllreduce(comm, two(3, 0), group_size=2, **options)
    with pytest.raises(ValueError, match="there is no array 1 for by_value: 1 are"):
        GroupAllreduce(comm, np.zeros(3), by_value=[1])
    GroupAllreduce(comm, np.zeros(3), by_value=[0]).close()
