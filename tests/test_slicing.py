"""The allreduce of long vectors, in slices that one member each averages."""

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from together import (
    NEVER,
    RULES,
    assert_equal_everywhere,
    compute_until,
    group_mean,
    interrupt_in_the_middle,
    interrupted,
    slicing,
    vector_of,
    wait_until,
)

from collectives import GroupAllreduce
from collectives.topology import shuffle

LINE = slicing.LINE
lengths = st.integers(1, 600_000).map(lambda lines: lines * LINE)
sizes = st.integers(2, 300)


def laid_out(length, size):
    plan = slicing.Slicing()
    plan.begin(length, size)
    return plan


@given(lengths, sizes)
def test_the_slices_of_all_blocks_are_the_vector(length, size):
    plan = laid_out(length, size)
    at = 0
    for block in range(plan.blocks):
        for member in range(size):
            assert plan.bound(block, member) == at
            at = plan.bound(block, member + 1)
            assert at % LINE == 0
        assert at == plan.end(block)
    assert at == length


@given(lengths, sizes)
def test_slices_of_a_block_differ_by_no_more_than_the_last_ones_lack(length, size):
    """All but one of those that have anything have the same."""
    plan = laid_out(length, size)
    for block in range(plan.blocks):
        bounds = [plan.bound(block, member) for member in range(size + 1)]
        different = {b - a for a, b in itertools.pairwise(bounds) if b > a}
        assert len(different) <= 2


@given(lengths, sizes)
def test_blocks_are_bounded(length, size):
    """What is in flight is a small part of a long vector, and no slice leaves the cache."""
    plan = laid_out(length, size)
    assert plan.block <= max(length / slicing.BLOCKS, slicing.LONGEST_BLOCK) + size * LINE
    assert plan.bound(0, 1) <= slicing.LONGEST + LINE
    assert (plan.blocks - 1) * plan.block < length


def test_short_vectors_and_single_members_are_not_sliced():
    assert not slicing.suits(slicing.SHORTEST_VECTOR - LINE, 2)
    assert slicing.suits(slicing.SHORTEST_VECTOR, 2)
    assert not slicing.suits(2**30, 1)
    assert not slicing.suits(2**20, 2**20 // slicing.SHORTEST + 1)


def new_vector(rank, length, t=0):
    return vector_of(rank, t, length, np.float32)


# One block; its last line; two; several and a short last one.
LENGTHS = [slicing.SHORTEST_VECTOR // 4, 131_089, 262_160, 1_000_001, 2_500_000]


@pytest.mark.mpi
@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("length", LENGTHS)
def test_long_vectors_are_averaged_bit_for_bit(comm, length):
    """In groups of every size, after pauses that let blocks end in different orders."""
    if comm.size * length > 10**7:
        pytest.skip("too long for so many ranks")
    chance = random.Random(comm.rank)
    for group_size in {2, (comm.size + 1) // 2, comm.size}:
        with GroupAllreduce(
            comm, new_vector(0, length), group_size=group_size, sync_period=3, wait="group"
        ) as average:
            for t in range(3):
                members = range(comm.size)
                if t < 2:
                    members = shuffle(comm.size, group_size).members(comm.rank, t)
                mine = new_vector(comm.rank, length, t)
                time.sleep(chance.random() * 1e-3)
                average(mine)
                expected = group_mean(
                    [[new_vector(rank, length, t)] for rank in members], [1] * len(members)
                )
                assert mine.tobytes() == expected[0].tobytes()


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_who_computes_takes_part_with_a_long_vector(comm, late):
    length = 1_500_000
    mine = new_vector(comm.rank, length)
    expected = group_mean([[new_vector(rank, length)] for rank in range(4)], [1.0] * 4)[0]
    with GroupAllreduce(comm, mine, group_size=4, sync_period=NEVER, late=late) as average:
        if comm.rank == 0:
            assert average(mine).timely
            assert mine.tobytes() == expected.tobytes()
        compute_until(comm, everybody_else_is_done=comm.rank == 0)
        wait_until(lambda: average.executed == 1)
        comm.Barrier()
        if comm.rank:
            assert not average(mine).timely
        if comm.rank and late == "conserving":
            # What it gave had not changed since it was contributed.
            assert mine.tobytes() == expected.tobytes()
        average.synchronize(mine)
        assert_equal_everywhere(comm, mine)


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_who_is_interrupted_before_the_others_come_has_its_vector_back(comm, late):
    """What it does with it then does not reach the average."""
    length = 1_500_000
    mine = new_vector(comm.rank, length)
    expected = group_mean([[new_vector(rank, length)] for rank in range(4)], [1.0] * 4)[0]
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, wait="group", late=late
    ) as average:
        if comm.rank == 0:
            with interrupted():
                average(mine)
            assert mine.tobytes() == new_vector(0, length).tobytes()
            mine[:] = 1e9
            comm.Ibarrier().Wait()
            wait_until(lambda: average.executed == 1)
            assert (mine == 1e9).all()
        else:
            comm.Ibarrier().Wait()
            average(mine)
            assert mine.tobytes() == expected.tobytes()


def interrupt(comm, operation, mine, **timing):
    def prepare():
        mine[:] = (0, 3, 9, 12)[comm.rank]

    return interrupt_in_the_middle(comm, prepare, lambda: operation(mine), [mine], **timing)


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.transports()
@pytest.mark.parametrize(
    ("what", "late", "transport"),
    # Under either rule average() takes the vector where it is, and publishes nothing.
    [
        ("call", "paper", "messages"),
        ("call", "conserving", "shared"),
        ("synchronize", "paper", "shared"),
        ("synchronize", "conserving", "messages"),
        ("average", "conserving", "messages"),
        ("average", "conserving", "shared"),
    ],
    indirect=["transport"],
)
@pytest.mark.usefixtures("through_memory")
def test_who_is_interrupted_in_an_exchange_has_its_vector_back(comm, late, what):
    mine = np.zeros(4_000_000)
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, wait="group", late=late
    ) as average:
        operation = average if what == "call" else getattr(average, what)
        interrupt(comm, operation, mine)
        if comm.rank == 0:
            left = mine.copy()
            mine[:] = 1e9
            comm.Ibarrier().Wait()
            assert (mine == 1e9).all()
            assert set(np.unique(left)) <= {0, 6}
        else:
            np.testing.assert_array_equal(mine, 6)
            comm.Ibarrier().Wait()


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.transports()
@pytest.mark.parametrize(
    ("engine", "transport"),
    [("adaptive", "messages"), ("adaptive", "shared"), ("dedicated", "messages")],
    indirect=["transport"],
)
@pytest.mark.usefixtures("through_memory")
def test_an_exchange_that_was_interrupted_loses_no_update_and_counts_none_twice(comm, engine):
    """Conserving: what came in after the exception is not taken for the application's change."""
    mine = np.zeros(4_000_000)
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, wait="group", engine=engine
    ) as average:
        average(mine)
        interrupt(comm, average, mine)
        average.synchronize(mine)
        np.testing.assert_array_equal(mine, 6)


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
def test_a_change_is_left_out_if_a_stopped_rank_may_still_write_to_its_base(comm):
    """Rank 1 is stopped for longer than rank 0's exception waits for its messages."""
    mine = np.zeros(2_000_000)
    with GroupAllreduce(comm, mine, group_size=4, sync_period=NEVER, wait="group") as average:
        attempts = interrupt(comm, average, mine, seconds=4)
        if comm.rank == 0:
            wait_until(lambda: average.executed == attempts)
            mine += 4
        for mean in (6, 10):
            average(mine)
            np.testing.assert_array_equal(mine, mean)
            mine += 4
        assert average.statistics().left_out == (comm.rank == 0)
