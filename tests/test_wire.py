"""Long vectors and short, sent as fp16 or bf16 differences from the last average of all."""

import ml_dtypes
import numpy as np
import pytest
from together import (
    NEVER,
    RULES,
    assert_equal_everywhere,
    compute_until,
    sliced_mean,
    travelling,
    wait_until,
)

from collectives import GroupAllreduce

pytestmark = [pytest.mark.mpi, pytest.mark.transports("messages")]  # nothing else is compressed

WIRES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8}
LENGTHS = [[5], [300_001], [100, 70_001, 3]]

each_wire = pytest.mark.parametrize("wire", WIRES)
each_rule = pytest.mark.parametrize("late", RULES)


def vectors_of(rank, lengths, t=0):
    """Arrays of float32, float64 and float16 in turn."""
    chance = np.random.default_rng((rank, t))
    dtypes = [np.float32, np.float64, np.float16]
    return [
        (1 + 0.01 * chance.standard_normal(length)).astype(dtypes[i % 3])
        for i, length in enumerate(lengths)
    ]


def encoded(array, reference, wire):
    """What travels for an array."""
    if array.dtype == np.float16:
        return array
    largest = float(ml_dtypes.finfo(WIRES[wire]).max)
    return np.clip((array - reference).astype(np.float32), -largest, largest).astype(WIRES[wire])


def decoded(mean, reference):
    if reference.dtype == np.float16:
        return mean
    return reference + mean.astype(reference.dtype)


def wire_mean(vectors, references, weights, wire):
    """The mean as the members get it: rounded on its way, and as a mean."""
    return [
        decoded(sliced_mean([encoded(array, r, wire) for array in arrays], weights), r)
        for r, *arrays in zip(references, *vectors)
    ]


def assert_same_bits(ours, theirs):
    assert [array.tobytes() for array in ours] == [array.tobytes() for array in theirs]


@pytest.mark.ranks(3, 4)
@each_wire
@each_rule
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_mean_is_that_of_rounded_differences_bit_for_bit(comm, wire, late, lengths):
    """From zero at first, and from what the last average over all ranks gave after it."""
    mine = vectors_of(comm.rank, lengths)
    weights = [1.0 + rank for rank in range(comm.size)]
    references = [np.zeros_like(array) for array in mine]
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=2, wait="group", late=late, wire_dtype=wire
    ) as average:
        for t in range(4):
            everyone = [vectors_of(rank, lengths, t) for rank in range(comm.size)]
            mine = vectors_of(comm.rank, lengths, t)
            result = average(mine, weight=weights[comm.rank])
            expected = wire_mean(everyone, references, weights, wire)
            assert_same_bits(mine, expected)
            if result.synchronized:
                references = expected
        average.average(mine)
        average.synchronize(mine)
        assert_equal_everywhere(comm, mine)


@pytest.mark.ranks(3, 4)
@each_wire
def test_the_error_is_within_its_bound(comm, wire):
    rounding, least = ROUNDING[wire], 2.0**-24
    chance = np.random.default_rng(7)
    inputs = chance.standard_normal((comm.size, 50_000)) * 10.0 ** chance.integers(-9, 4, 50_000)
    mine = inputs[comm.rank].astype(np.float32)
    inputs = inputs.astype(np.float32).astype(float)
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, wait="group", wire_dtype=wire
    ) as average:
        average(mine)
    mean = inputs.mean(axis=0)
    bound = rounding * (np.abs(inputs).mean(axis=0) + np.abs(mean)) * 1.01 + least
    error = np.abs(mine - mean)
    assert (error <= bound).all()
    assert error.max() > 0


@pytest.mark.ranks(3, 4)
@each_wire
def test_from_an_initial_vector_that_all_have_only_changes_are_rounded(comm, wire):
    mine = vectors_of(0, [1000, 10, 5])
    initial = [array.copy() for array in mine]
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, wait="group", wire_dtype=wire
    ) as average:
        average(mine)
        assert_same_bits(mine, initial)
        mine[0] += np.float32(1e-3 * comm.rank)
        average(mine)
    change = mine[0] - initial[0]
    np.testing.assert_allclose(change, 1e-3 * (comm.size - 1) / 2, atol=1e-3 * ROUNDING[wire] * 4)


@pytest.mark.ranks(4)
@each_wire
@each_rule
def test_small_updates_of_large_numbers_are_not_lost(comm, wire, late):
    """Each is below the half's resolution of the number that it changes."""
    mine = np.full(1000, 100.0, np.float32)
    with GroupAllreduce(
        comm, mine, group_size=2, sync_period=4, wait="group", late=late, wire_dtype=wire
    ) as average:
        average.synchronize(mine)
        for _ in range(40):
            mine += np.float32(0.002 * comm.rank)
            average(mine)
    np.testing.assert_allclose(mine - 100, 40 * 0.003, rtol=0.02)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [64, 400_000])
@pytest.mark.parametrize(("dtype", "share"), [(np.float32, 2), (np.float64, 4)])
def test_fewer_bytes_are_sent(comm, length, dtype, share):
    mine = np.zeros(length, dtype)
    slices = 6 * -(-travelling([mine]) // share // 256) * 64
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, wait="group", wire_dtype="float16"
    ) as average:
        average(mine)
        sent = comm.allreduce(average.statistics().bytes_sent - 3 * 16)
    # All ranks together send three slices of four, and their own, averaged, to three others.
    assert sent <= 4 * slices
    assert sent == pytest.approx(6 * mine.nbytes / share, rel=0.5 if length == 64 else 0.01)


@pytest.mark.ranks(3)
def test_too_large_a_difference_becomes_the_largest_not_infinite(comm):
    mine = np.zeros(3, np.float32)
    with GroupAllreduce(
        comm, mine, group_size=3, sync_period=NEVER, wait="group", wire_dtype="float16"
    ) as average:
        mine[:] = 1e6, -1e6, 65504
        average(mine)
    np.testing.assert_allclose(mine, [65504, -65504, 65504], rtol=1e-3)


@pytest.mark.ranks(3, 4)
@each_rule
def test_who_computes_takes_part_and_who_is_not_finite_does_not(comm, late):
    mine = np.full(20_000, 8.0 * comm.rank, np.float32)
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, late=late, wire_dtype="bfloat16"
    ) as average:
        expected = 4.0 * (comm.size - 1)
        if comm.rank == 0:
            assert average(mine).timely
            np.testing.assert_allclose(mine, expected, rtol=0.01)
        compute_until(comm, everybody_else_is_done=comm.rank == 0)
        wait_until(lambda: average.executed == 1)
        comm.Barrier()
        if comm.rank:
            average(mine)
        mine[:] = comm.rank
        if comm.rank == comm.size - 1:
            mine[3] = np.nan
        average.synchronize(mine)
        assert np.isfinite(mine).all()
        assert_equal_everywhere(comm, mine)
        for _ in range(2):
            mine[:] = np.nan
            average.synchronize(mine)
        assert np.isnan(mine).all() or late == "conserving"
        mine[:] = comm.rank
        average.average(mine)
        assert_equal_everywhere(comm, mine)


@pytest.mark.ranks(1, 3)
def test_a_rank_alone_is_not_rounded(comm):
    mine = np.full(1000, 1 / 3, np.float32)
    with GroupAllreduce(
        comm, mine, group_size=1, sync_period=NEVER, wire_dtype="bfloat16"
    ) as average:
        average(mine)
    assert (mine == np.float32(1 / 3)).all()


@pytest.mark.ranks(3)
def test_ranks_may_name_one_wire_dtype_in_several_ways(comm):
    wire = ["float16", np.float16, np.dtype("float16")][comm.rank]
    with GroupAllreduce(comm, np.zeros(3), group_size=1, wire_dtype=wire) as average:
        assert average.wire_dtype == "float16"


@pytest.mark.ranks(3)
def test_an_unknown_wire_dtype_is_refused(comm):
    with pytest.raises(ValueError, match="wire_dtype is 'int8', not one of float16, bfloat16"):
        GroupAllreduce(comm, np.zeros(3), group_size=1, wire_dtype="int8")
    with pytest.raises(ValueError, match="wire_dtype differs between ranks: None on ranks 0-1"):
        wire = "float16" if comm.rank == 2 else None
        GroupAllreduce(comm, np.zeros(3), group_size=1, wire_dtype=wire)
