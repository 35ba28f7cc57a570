"""Arrays that take part in some versions only: the others keep their changes, and sums."""

from __future__ import annotations

import time

import numpy as np
import pytest
from together import before_transports, bytes_of, same_everywhere

from collectives import GroupAllreduce
from collectives.topology import group_of

pytestmark = pytest.mark.mpi

PERIOD = 6
LENGTHS = {"short": (40, 30, 20), "long": (50_000, 150_000, 70_001)}
each_length = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
DTYPES = np.float64, np.float32, np.float64


def zeros(lengths):
    return [np.zeros(length, dtype) for length, dtype in zip(lengths, DTYPES, strict=True)]


def change(rank, t, array):
    """Return what a rank adds to an array before a call: a small integer."""
    return 16 * (1 + (3 * rank + 5 * t + 7 * array) % 11)


def add(x, comm, t):
    for index, array in enumerate(x):
        array += change(comm.rank, t, index)


def takes_part(index, t, last):
    return last or index == 0 or (index == 1 and (t + 1) % 2 == 0)


@pytest.mark.ranks(1, 3, 4, 8)
@each_length
def test_each_array_is_averaged_in_its_versions(comm, lengths):
    """Array 1 in every second version, array 2 in averages over all ranks only."""
    size = min(2, comm.size)
    x = zeros(lengths)
    expected = np.zeros((comm.size, 3))
    with GroupAllreduce(
        comm,
        x,
        group_size=size,
        sync_period=PERIOD,
        wait="group",
        only_all_ranks=[2],
        every={1: 2},
    ) as allreduce:
        for t in range(2 * PERIOD + 3):
            add(x, comm, t)
            allreduce(x)
            last = (t + 1) % PERIOD == 0
            for rank in range(comm.size):
                expected[rank] += [change(rank, t, index) for index in range(3)]
            before = expected.copy()
            for index in range(3):
                if takes_part(index, t, last):
                    for rank in range(comm.size):
                        group = range(comm.size) if last else group_of(rank, comm.size, size, t)
                        expected[rank, index] = before[list(group), index].mean()
            for index, array in enumerate(x):
                np.testing.assert_allclose(array, expected[comm.rank, index], rtol=1e-6)
            if last:
                assert same_everywhere(comm, bytes_of(x))


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("pace", ["common", "own"])
@each_length
def test_sums_are_conserved_whoever_is_late(comm, lengths, pace):
    """Between averages over all ranks array 2 changes by the rank's own changes, exactly."""
    x = zeros(lengths)
    added = np.zeros(3)
    pauses = np.random.default_rng(comm.rank)
    with GroupAllreduce(
        comm, x, group_size=2, sync_period=PERIOD, pace=pace, only_all_ranks=[2], every={1: 3}
    ) as allreduce:
        for t in range(5 * PERIOD):
            add(x, comm, t)
            added += [change(comm.rank, t, index) for index in range(3)]
            before = x[2].copy()
            if pauses.random() < 0.3:
                time.sleep(0.002)
            result = allreduce(x)
            if pace == "common" and not result.synchronized:
                assert np.array_equal(x[2], before)
            assert all((array == array[0]).all() for array in x)
        mean = zeros(lengths)
        for array, own in zip(mean, x, strict=True):
            array[...] = own
        allreduce.average(mean)
        expected = sum(comm.allgather(added)) / comm.size
        for index in range(3):
            np.testing.assert_allclose(mean[index], expected[index], rtol=1e-5)
        assert same_everywhere(comm, bytes_of(mean))


@pytest.mark.ranks(4)
def test_a_rank_that_computes_takes_part_with_its_arrays_and_keeps_the_rest(comm):
    """Rank 0 makes no call while the others make a period's but one: all its array is its own."""
    x = zeros(LENGTHS["long"])
    with GroupAllreduce(
        comm, x, group_size=2, sync_period=PERIOD, only_all_ranks=[1, 2]
    ) as allreduce:
        for array in x:
            array += comm.rank
        if comm.rank == 0:
            comm.Barrier()
        for _ in range(PERIOD - 1):
            allreduce(x)
        if comm.rank != 0:
            comm.Barrier()
        assert (x[1] == comm.rank).all()
        assert (x[2] == comm.rank).all()
        allreduce(x)
        for array in x:
            np.testing.assert_allclose(array, 1.5, rtol=1e-6)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wait", ["group", "nobody"])
@each_length
def test_a_rank_whose_change_is_not_finite_keeps_its_other_arrays(comm, lengths, wait):
    x = zeros(lengths)
    with GroupAllreduce(
        comm, x, group_size=4, sync_period=PERIOD, wait=wait, only_all_ranks=[2]
    ) as allreduce:
        for t in range(PERIOD):
            for array in x:
                array += 1
            if comm.rank == 1 and t == 2:
                x[0][3] = np.nan
            allreduce(x)
        for array in x:
            assert np.isfinite(array).all()
        assert same_everywhere(comm, bytes_of(x))
        expected = PERIOD if wait == "group" else PERIOD - 1 / 4
        np.testing.assert_allclose(x[2], expected, rtol=1e-6)


@pytest.mark.ranks(3, 4)
@each_length
def test_a_rank_whose_vectors_are_not_finite_time_and_again_keeps_its_other_arrays(comm, lengths):
    """While no call waits for its application, only that has the arrays that are left out."""
    x = zeros(lengths)
    settings = {"sync_period": PERIOD, "wait": "group", "late": "conserving"}
    with GroupAllreduce(comm, x, group_size=2, **settings, only_all_ranks=[1, 2]) as allreduce:
        for t in range(PERIOD - 1):
            add(x, comm, t)
            if comm.rank == 0 and t > 0:
                x[0][3] = np.nan
            given = [array.copy() for array in x[1:]]
            weight = allreduce(x).weight
            assert weight > 0 and np.isfinite(x[0]).all()
            for array, before in zip(x[1:], given):
                np.testing.assert_array_equal(array, before)


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("messages")
@each_length
def test_compressed_arrays_take_part_in_their_versions(comm, lengths):
    x = zeros(lengths)
    with GroupAllreduce(
        comm,
        x,
        group_size=2,
        sync_period=PERIOD,
        wait="group",
        only_all_ranks=[2],
        wire_dtype="float16",
    ) as allreduce:
        for t in range(PERIOD):
            for array in x:
                array += comm.rank + 1
            before = x[2].copy()
            allreduce(x)
            if t < PERIOD - 1:
                assert np.array_equal(x[2], before)
        expected = PERIOD * np.mean([rank + 1 for rank in range(comm.size)])
        for array in x:
            np.testing.assert_allclose(array, expected, rtol=2e-3)


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("messages")
def test_only_what_takes_part_is_sent(comm):
    sent = []
    for only in ([], [1]):
        x = [np.zeros(100_000), np.zeros(300_000)]
        with GroupAllreduce(
            comm, x, group_size=2, sync_period=10**6, wait="group", only_all_ranks=only
        ) as allreduce:
            for _ in range(4):
                allreduce(x)
            sent.append(allreduce.statistics().bytes_sent)
    if sent[0]:  # of three ranks one is alone in some versions
        assert sent[1] == pytest.approx(sent[0] / 4, rel=0.01)


@pytest.mark.ranks(3)
@before_transports
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only_all_ranks": [2]}, "there is no array 2 for only_all_ranks or every: 2 are"),
        ({"only_all_ranks": [0]}, "array 0 must take part in every version"),
        ({"only_all_ranks": 1}, "only_all_ranks is 1, not a list of indices"),
        ({"only_all_ranks": ["1"]}, "array '1' of only_all_ranks or every is not an integer"),
        ({"every": [1]}, r"every is \[1\], not a dict from indices to numbers of versions"),
        ({"every": {1: 0}}, r"every\[1\] is 0, not 1 to"),
        ({"every": {1: 2.5}}, r"every\[1\] is 2.5, not an integer"),
        ({"every": {1: 2}, "only_all_ranks": [1]}, "array 1 is in only_all_ranks and in every"),
        ({"only_all_ranks": [1], "late": "paper"}, "late is 'paper' with only_all_ranks or every"),
    ],
)
def test_what_is_no_period_is_refused(comm, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GroupAllreduce(comm, [np.zeros(3), np.zeros(4)], group_size=2, **options)


@pytest.mark.ranks(3)
@before_transports
def test_a_wrong_order_is_refused(comm):
    like = [np.zeros(3), np.zeros(4), np.zeros(5)]
    for options in ({"only_all_ranks": [1]}, {"every": {1: 3, 2: 4}}, {"every": {1: 2}}):
        with pytest.raises(ValueError, match="an array must take part whenever a later one does"):
            GroupAllreduce(comm, like, group_size=2, **options)


@pytest.mark.ranks(3)
@before_transports
def test_periods_that_differ_between_ranks_are_refused(comm):
    with pytest.raises(ValueError, match="only_all_ranks differs between ranks"):
        GroupAllreduce(
            comm, [np.zeros(3), np.zeros(4)], group_size=2, only_all_ranks=[1] if comm.rank else []
        )
