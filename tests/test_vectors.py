"""What a collective averages: lists, fp16 and bf16, weights, and what is not finite."""

import random
import time
from functools import cache
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest
from together import (
    NEVER,
    RULES,
    as_list,
    assert_equal_everywhere,
    before_transports,
    bytes_of,
    group_mean,
    same_everywhere,
    wait_until,
    weighted,
)

from collectives import ClosedError, GroupAllreduce, RankFailedError
from collectives.topology import group_of, shuffle

pytestmark = pytest.mark.mpi

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
DTYPES = [*HALVES, np.dtype(np.float32), np.dtype(np.float64)]
# Short arrays of odd lengths; then, in blocks of 512 KiB, some that straddle and some of several.
LENGTHS = [1, 3, 64, 257, 1000, 31, 2] * 14 + [100_001, 70_001, 300_001, 20_001]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
each_rule = pytest.mark.parametrize("late", RULES)


@cache
def many_arrays(rank, t):
    """A list of arrays of all dtypes in turn."""
    chance = np.random.default_rng((rank, t))
    return [
        chance.standard_normal(length, np.float32).astype(DTYPES[i % len(DTYPES)])
        for i, length in enumerate(LENGTHS)
    ]


def one_of_each(value, length=3):
    return [np.full(length + i, value, dtype) for i, dtype in enumerate(DTYPES)]


def copy_of(vector):
    return [array.copy() for array in vector]


def assert_same_bits(vector, expected):
    for i, (ours, theirs) in enumerate(zip(as_list(vector), as_list(expected))):
        assert ours.tobytes() == theirs.tobytes(), f"array {i}, {ours.dtype}: {ours} != {theirs}"


def assert_equal_in_groups(comm, vector, group):
    """Bit for bit, on all ranks that were in one group."""
    contents = {}
    for members, content in comm.allgather((group, crc32(bytes_of(vector)))):
        contents.setdefault(members, set()).add(content)
    assert all(len(different) == 1 for different in contents.values())


def finite_patterns(dtype):
    """Every finite number of a half type."""
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    return numbers[np.isfinite(numbers.astype(np.float32))]


# Lists, and weights


@pytest.mark.ranks(1, 3, 4, 8)
@each_rule
@pytest.mark.parametrize("weigh", [False, True])
def test_a_list_of_all_dtypes_is_the_weighted_mean_bit_for_bit(comm, late, weigh):
    """Also in a group and over all ranks, in one version with one result."""
    weights = [(0.5 + rank % 3 if weigh else 1.0) for rank in range(comm.size)]
    for group_size in {1, 2, comm.size}:
        group_size = min(group_size, comm.size)
        with GroupAllreduce(
            comm, many_arrays(0, 0), group_size=group_size, sync_period=2, wait="group", late=late
        ) as average:
            for t in range(2):
                mine = copy_of(many_arrays(comm.rank, t))
                result = average(mine, weight=weights[comm.rank])
                members = range(comm.size)
                if t == 0:
                    members = shuffle(comm.size, group_size).members(comm.rank, t)
                inputs = [many_arrays(rank, t) for rank in members]
                shares = [weights[rank] for rank in members]
                assert_same_bits(mine, group_mean(inputs, shares))
                assert (result.version, result.source, result.timely) == (t, t, True)
                assert (result.group, result.synchronized) == (tuple(sorted(members)), t == 1)
                assert result.weight == pytest.approx(sum(shares), rel=1e-15)
                assert_equal_in_groups(comm, mine, result.group)


@pytest.mark.ranks(4)
@each_dtype
def test_a_list_of_one_array_is_what_that_array_is(comm, dtype):
    array = many_arrays(comm.rank, 0)[DTYPES.index(dtype) + 4].copy()
    listed = array.copy()
    for vector, like in ((array, array), ([listed], [listed])):
        with GroupAllreduce(comm, like, group_size=4, wait="group") as average:
            average(vector)
    assert_same_bits(array, listed)


@pytest.mark.ranks(3, 4)
@each_rule
def test_a_late_list_gets_what_the_rule_says(comm, late):
    """Rank 0 overtakes the others by one version; then they arrive, with lists or tuples."""
    like = one_of_each(4.0 * comm.rank)
    mine = tuple(one_of_each(4.0 * comm.rank + 8))
    contributed = [8.0] + [4.0 * rank for rank in range(1, comm.size)]
    with GroupAllreduce(comm, like, group_size=comm.size, sync_period=NEVER, late=late) as average:
        if comm.rank == 0:
            average(mine)
        wait_until(lambda: average.executed == 1)
        comm.Barrier()
        inputs = [[np.full_like(array, value) for array in like] for value in contributed]
        mean = group_mean(inputs, [1] * comm.size)
        if comm.rank == 0:
            assert_same_bits(mine, mean)
        else:
            assert not average(mine).timely
            x = 4.0 * comm.rank + 8
            for array, m in zip(mine, mean):
                expected = (
                    weighted(np.full_like(m, x), 1, m, comm.size) if late == "paper" else m + 8
                )
                np.testing.assert_allclose(
                    array.astype(float), expected.astype(float), rtol=ml_dtypes.finfo(m.dtype).eps
                )


@pytest.mark.ranks(3, 4, 8)
@each_rule
def test_lists_are_never_torn_and_equal_after_synchronizations(comm, late):
    """All arrays of a list hold one number; timely, late and passive ranks contribute them."""
    chance = random.Random(comm.rank)
    lengths, group_size = [40_000, 1, 30_001], (comm.size + 1) // 2
    mine = [np.zeros(length) for length in lengths]
    timely = set()
    with GroupAllreduce(comm, mine, group_size=group_size, sync_period=5, late=late) as average:
        for t in range(40):
            change = chance.random()
            for array in mine:
                array += change
            time.sleep(chance.random() * 0.002)
            if chance.random() < 0.2:
                average.publish(mine)
            result = average(mine)
            for array in mine:
                assert (array == mine[1][0]).all(), f"torn in call {t}"
            if result.synchronized:
                assert_equal_everywhere(comm, mine)
            else:
                timely.add(result.timely)
        shown = copy_of(mine)
        average.average(shown)
        average.synchronize(mine)
        assert_same_bits(mine, shown)
        assert_equal_everywhere(comm, mine)
    assert set().union(*comm.allgather(timely)) == {True, False}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "message", "wrong"),
    [
        (ValueError, "the vector has 1 arrays, the collective's have 4", lambda x: x[:1]),
        (TypeError, "the vector is a ndarray, not a list of 4 arrays", lambda x: x[0]),
        (
            TypeError,
            "array 2 of the vector is of dtype float64, the collective's of float32",
            lambda x: [*x[:2], x[2].astype(float), x[3]],
        ),
        (
            TypeError,
            "array 1 of the vector is of dtype uint16, the collective's of bfloat16",
            lambda x: [x[0], x[1].view(np.uint16), *x[2:]],
        ),
        (
            ValueError,
            "array 0 of the vector has 2 elements, the collective's have 3",
            lambda x: [x[0][:2], *x[1:]],
        ),
        (
            ValueError,
            "array 1 of the vector is not contiguous",
            lambda x: [x[0], np.zeros(8, x[1].dtype)[::2], *x[2:]],
        ),
        (TypeError, "array 3 of the vector is a NoneType", lambda x: [*x[:3], None]),
    ],
)
def test_a_wrong_list_raises_naming_the_array_and_others_learn_of_it(comm, kind, message, wrong):
    mine = one_of_each(1.0)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
        if comm.rank == 1:
            with pytest.raises(kind, match=message):
                average(wrong(mine))
            with pytest.raises(ClosedError):
                average(mine)
        else:
            with pytest.raises(RankFailedError, match=f"rank 1 failed.*{message}"):
                while True:
                    average(mine)
                    time.sleep(0.001)


@before_transports
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("message", "like"),
    [
        ("like is an empty list", []),
        (r"like\[1\] is of dtype int32", [np.zeros(1), np.zeros(1, np.int32)]),
        (r"like\[0\] is a float, not a numpy array", [1.0]),
        (r"length differs between ranks: \[3, 4\] on ranks .*; 3 on rank 1", np.zeros(3)),
        (
            r"dtype differs between ranks: \['float64', 'float64'\] on ranks .*; "
            r"\['float64', 'bfloat16'\] on rank 1",
            [np.zeros(3), np.zeros(4, ml_dtypes.bfloat16)],
        ),
    ],
)
def test_a_wrong_initial_list_raises_on_all_ranks(comm, message, like):
    like = like if comm.rank == 1 else [np.zeros(3), np.zeros(4)]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        GroupAllreduce(comm, like, group_size=1)
    assert same_everywhere(comm, str(caught.value))


# Halves


@pytest.mark.ranks(4)
@each_half
def test_every_half_is_loaded_and_stored_exactly(comm, dtype):
    """Of two members each: x and x give x, x and 0 give x/2; the others round to nearest, even."""
    x = finite_patterns(dtype)
    chance = np.random.default_rng(0)
    partners = [x, np.zeros_like(x), np.roll(x, 1), *(chance.permutation(x) for _ in range(3))]
    weights = [1, 1, 1, 1, 3, 3]
    with GroupAllreduce(
        comm, x.copy(), group_size=2, sync_period=NEVER, wait="group", late="paper"
    ) as average:
        for t, (y, weight) in enumerate(zip(partners, weights)):
            first = comm.rank == group_of(comm.rank, 4, 2, t)[0]
            mine = (x if first else y).copy()
            average(mine, weight=1 if first else weight)
            assert_same_bits(mine, weighted(x, 1, y, weight))
            if t == 0:
                assert_same_bits(mine, x)
            if t == 1:
                half = (x.astype(float) / 2).astype(dtype)
                np.testing.assert_array_equal(mine.astype(float), half.astype(float))


@pytest.mark.ranks(3)
@each_half
def test_fp16_and_bf16_are_summed_in_single_precision(comm, dtype):
    """In fp16 or bf16 the mean of three equal numbers would be another number."""
    x = finite_patterns(dtype)
    third = x.dtype.type(1 / 3)
    in_half_precision = third * x + (third * x + third * x)
    assert (in_half_precision != x).mean() > 0.3
    mine = x.copy()
    with GroupAllreduce(
        comm, x.copy(), group_size=3, sync_period=NEVER, wait="group", late="paper"
    ) as average:
        average(mine)
    assert_same_bits(mine, x)


@pytest.mark.ranks(3, 4)
@each_half
def test_a_late_change_of_halves_is_computed_in_single_precision(comm, dtype):
    """Rank 1 gets 1 + (x − (−1)) for an even x beyond which no odd number is a half."""
    even = dtype.type(2 / float(ml_dtypes.finfo(dtype).eps))
    assert 1 + (even + dtype.type(1)) == even
    like = np.full(3, -1 if comm.rank == 1 else 1, dtype)
    with GroupAllreduce(
        comm, like, group_size=comm.size, sync_period=NEVER, late="conserving"
    ) as average:
        mine = np.full(3, {0: 3, 1: even}.get(comm.rank, 1), dtype)
        if comm.rank == 0:
            average(mine)
            np.testing.assert_array_equal(mine.astype(float), 1)
        wait_until(lambda: average.executed == 1)
        comm.Barrier()
        if comm.rank == 1:
            assert not average(mine).timely
            np.testing.assert_array_equal(mine.astype(float), float(even) + 2)


@pytest.mark.ranks(3, 4, 8)
@each_dtype
@each_rule
def test_sums_never_overflow(comm, dtype, late):
    largest = float(ml_dtypes.finfo(dtype).max)
    values = [60000.0, -largest if dtype in HALVES else -0.99 * largest]
    with GroupAllreduce(
        comm, np.zeros(100, dtype), group_size=comm.size, sync_period=2, wait="group", late=late
    ) as average:
        for value in values:
            for weight in (1, 1000):
                x = np.full(100, value, dtype)
                mine = x.copy()
                result = average(mine, weight=weight)
                assert result.weight == weight * comm.size
                np.testing.assert_allclose(mine.astype(float), x.astype(float), rtol=1e-6)


@pytest.mark.ranks(4)
@each_dtype
def test_a_change_that_would_overflow_is_dropped_and_counted(comm, dtype):
    """Rank 1 is late; what it changes and what the others averaged are finite, their sum is not."""
    largest = float(ml_dtypes.finfo(dtype).max)
    like = np.full(3, 0.0 if comm.rank == 1 else 0.9 * largest, dtype)
    with GroupAllreduce(comm, like, group_size=4, sync_period=NEVER, late="conserving") as average:
        mine = like.copy()
        if comm.rank == 0:
            average(mine)
            assert float(mine[0]) > 0.6 * largest
        wait_until(lambda: average.executed == 1)
        comm.Barrier()
        if comm.rank != 0:
            if comm.rank == 1:
                mine[1] = 0.8 * largest
            result = average(mine)
            assert not result.timely
        assert average.statistics().left_out == (comm.rank == 1)
        # Nobody has changed anything, so all have the mean, and it stays the mean.
        assert_equal_everywhere(comm, mine)
        before = mine.copy()
        average.synchronize(mine)
        assert_same_bits(mine, before)


# Weights


@pytest.mark.ranks(3, 4)
@each_dtype
@each_rule
def test_a_vector_of_weight_0_takes_the_others_mean(comm, dtype, late):
    with GroupAllreduce(
        comm, np.zeros(5, dtype), group_size=comm.size, sync_period=2, wait="group", late=late
    ) as average:
        for _ in range(2):
            mine = np.full(5, 100.0 if comm.rank == 1 else 2.0, dtype)
            result = average(mine, weight=0 if comm.rank == 1 else 0.25)
            assert result.weight == 0.25 * (comm.size - 1)
            np.testing.assert_array_equal(mine.astype(float), 2.0)


@pytest.mark.ranks(1, 3, 4)
@each_rule
@pytest.mark.parametrize("wait", ["nobody", "group"])
@pytest.mark.parametrize("bad", ["weight 0", "not finite"])
def test_without_any_weight_a_group_keeps_its_lists_and_all_ranks_average(comm, late, wait, bad):
    mine = one_of_each(float(comm.rank + 1))
    if bad == "not finite":
        for array in mine:
            array[0] = np.nan
    kept = bytes_of(mine)
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=3, wait=wait, late=late
    ) as average:
        # What was contributed before the first call has weight 1.
        average.publish(mine, weight=0)
        comm.Barrier()
        for t in range(6):
            result = average(mine, weight=0)
            assert result.weight == 0
            assert result.synchronized == (t % 3 == 2)
            if result.synchronized and bad == "weight 0":
                kept = bytes_of(one_of_each((comm.size + 1) / 2))
            assert bytes_of(mine) == kept
        average.average(mine)
        assert bytes_of(mine) == kept
        assert average.statistics().left_out == (0 if bad == "weight 0" else 8)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("weight", [-1, np.nan, np.inf, "x", [1.0]])
def test_a_wrong_weight_raises_and_the_other_ranks_learn_of_it(comm, weight):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
        if comm.rank == 1:
            with pytest.raises((ValueError, TypeError), match="weight is"):
                average(mine, weight=weight)
        else:
            with pytest.raises(RankFailedError, match="rank 1 failed.*weight is"):
                while True:
                    average(mine)
                    time.sleep(0.001)


@pytest.mark.ranks(3, 4)
@each_rule
def test_a_late_vector_has_the_weight_that_was_published_with_it(comm, late):
    """Rank 0 calls twice alone; in between the others arrive late, with other weights."""
    size = comm.size
    weights = [3.0, 0.5, 2.0, 8.0][:size]
    like = np.full(2, 4.0 * comm.rank)
    mine = like + 2
    with GroupAllreduce(comm, like, group_size=size, sync_period=NEVER, late=late) as average:
        if comm.rank == 0:
            result = average(mine, weight=weights[0])
            assert result.weight == weights[0] + size - 1
        wait_until(lambda: average.executed == 1)
        comm.Barrier()
        mean = (weights[0] * 2 + sum(4 * rank for rank in range(1, size))) / (weights[0] + size - 1)
        if comm.rank == 0:
            np.testing.assert_allclose(mine, mean)
        else:
            result = average(mine, weight=weights[comm.rank])
            assert not result.timely
            total, own = weights[0] + size - 1, weights[comm.rank]
            assert result.weight == total
            x = 4 * comm.rank + 2
            blended = (total * mean + own * x) / (total + own)
            np.testing.assert_allclose(mine, blended if late == "paper" else mean + 2)
        comm.Barrier()
        if comm.rank == 0:
            assert average(mine, weight=0).weight == sum(weights[1:])
        wait_until(lambda: average.executed == 2)
        comm.Barrier()
        average.publish(mine, weight=0.125)
        comm.Barrier()
        if comm.rank == 0:
            assert average(mine, weight=2).weight == 2 + 0.125 * (size - 1)
        comm.Barrier()


# What is not finite


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("synchronous", [False, True])
def test_one_value_in_one_array_leaves_the_whole_list_out(comm, value, synchronous):
    with GroupAllreduce(
        comm,
        one_of_each(0.0),
        group_size=comm.size,
        sync_period=1 if synchronous else NEVER,
        wait="group",
        late="paper",
    ) as average:
        for i in range(len(DTYPES)):
            mine = one_of_each(float(comm.rank))
            if comm.rank == 0:
                mine[i][-1] = value
            kept = bytes_of(mine)
            result = average(mine)
            assert (result.weight, result.timely) == (comm.size - 1, comm.rank != 0)
            assert result.synchronized == synchronous
            if comm.size == 1:
                assert bytes_of(mine) == kept
            else:
                for array in mine:
                    np.testing.assert_allclose(array.astype(float), 2.0, rtol=1e-2)
                assert_equal_everywhere(comm, mine)
            assert average.statistics().left_out == (i + 1) * (comm.rank == 0)
