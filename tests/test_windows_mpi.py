"""Arrays in memory that ranks share: averaged where they are, and otherwise as any other array."""

from __future__ import annotations

import contextlib
import gc
import os
import time

import ml_dtypes
import numpy as np
import pytest
from together import (
    Interrupted,
    as_list,
    bytes_of,
    interrupt_in_the_middle,
    interrupted,
    signalled,
)

from collectives import GroupAllreduce, RankFailedError, empty, empty_like
from collectives.exchange.shared import slots
from collectives.memory import other_processes, windows
from collectives.memory.allocation import fail_after

pytestmark = [pytest.mark.mpi, pytest.mark.transports()]

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
# Around the edges of blocks, for 2 to 8 members, and one with several.
LENGTHS = (1, 15, 16, 1000, 4096, 16 * 1024 - 1, 65_537, 400_003)


def values(rank, t, length, dtype):
    return np.random.default_rng((rank, t)).normal(size=length).astype(dtype)


@pytest.fixture(autouse=True)
def ways(monkeypatch):
    """Let the functions in WAYS say which way arrays are averaged."""
    monkeypatch.setattr(other_processes, "refuses", False)
    monkeypatch.setattr(other_processes, "shortest", other_processes.shortest)
    slots.set_longest(-1, -1)
    yield
    slots.set_longest()


def elsewhere(like):
    """Return arrays as `empty_like` does, in this process's own memory."""
    slots.set_longest(-1, -1)
    return np.zeros_like(like) if isinstance(like, np.ndarray) else [*map(np.zeros_like, like)]


def through_memory(comm, like):
    """Return arrays that are copied to shared memory and back: processes have no permission."""
    other_processes.refuses = True
    return elsewhere(like)


def copied(comm, like):
    """Return arrays that other processes read and write by the kernel's copies."""
    other_processes.refuses, other_processes.shortest = False, 0
    return elsewhere(like)


def in_windows(comm, like):
    """Return arrays in memory that other processes map, however short they are."""
    slots.set_longest(-1, -1)
    return empty_like(comm, like)


def by_slots(comm, like):
    """Return arrays of which each member averages copies for itself, however long they are."""
    arrays = elsewhere(like)
    slots.set_longest(1 << 30, 1 << 30)
    return arrays


def pairs_by_slots(comm, like):
    """Return the same, of which only two members do so; more go by blocks."""
    arrays = elsewhere(like)
    slots.set_longest(1 << 30, -1)
    return arrays


WAYS = through_memory, copied, in_windows, by_slots, pairs_by_slots


def assert_same(results):
    """Assert that all ways had the same results, one after the other."""
    count = len(results) // len(WAYS)
    parts = [results[i : i + count] for i in range(0, len(results), count)]
    assert len(parts) == len(WAYS)
    assert all(part == parts[0] for part in parts)


def run(comm, make, like, calls, **options):
    """Make the same calls with arrays that `make` returns; return each result, as bytes."""
    x = make(comm, like)
    found = []
    with GroupAllreduce(comm, x, transport="shared", **options) as average:
        for t in range(calls):
            for i, array in enumerate(as_list(x)):
                array += values(comm.rank, 10 * t + i, array.size, array.dtype)
            average(x)
            found.append(bytes_of(x))
        average.synchronize(x)
        found.append(bytes_of(x))
        average.average(x)
        found.append(bytes_of(x))
    return found


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize(
    ("dtype", "late"),
    [
        (np.dtype(np.float32), "conserving"),
        (np.dtype(np.float32), "paper"),
        *(
            pytest.param(np.dtype(dtype), "conserving", marks=pytest.mark.ranks(4))
            for dtype in DTYPES
            if dtype != np.float32
        ),
    ],
    ids=str,
)
def test_averages_have_the_same_bits(comm, dtype, late):
    """Where all members of every group wait for each other, whatever the length.

    Nobody is late, so that the late rule makes no difference to a dtype.
    """
    for length in LENGTHS:
        like = np.zeros(length, dtype)
        size = 2 if comm.size % 2 == 0 else comm.size
        options = {"group_size": size, "sync_period": 3, "wait": "group", "late": late}
        results = [run(comm, make, like, 4, **options) for make in WAYS]
        assert_same(results)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("count", [2, 4])
def test_lists_of_arrays_weights_and_left_out_arrays(comm, count):
    """Some arrays are averaged over all ranks only; the weights differ, and one is 0."""
    like = [np.zeros(1000, np.float32), np.zeros(70_001), np.zeros(333, np.float16)]
    results = []
    for make in WAYS:
        x = make(comm, like)
        with GroupAllreduce(
            comm,
            x,
            transport="shared",
            group_size=count if comm.size % count == 0 else comm.size,
            sync_period=4,
            wait="group",
            only_all_ranks=[2],
        ) as average:
            for t in range(6):
                for i, array in enumerate(x):
                    array += values(comm.rank, 10 * t + i, array.size, array.dtype)
                average(x, weight=float((comm.rank + t) % 3))
                results.append(bytes_of(x))
    assert_same(results)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", ["paper", "conserving"])
def test_what_is_not_finite_is_left_out(comm, late):
    """On one rank, and on all: then nobody's vector changes."""
    for bad in ([0], range(comm.size)):
        results = []
        for make in WAYS:
            x = make(comm, np.zeros(70_001, np.float32))
            with GroupAllreduce(
                comm, x, transport="shared", group_size=comm.size, wait="group", late=late
            ) as average:
                x += values(comm.rank, 0, x.size, x.dtype)
                average(x)
                if comm.rank in bad:
                    x[777] = np.nan
                average(x)
                results.append(bytes_of(x))
                x[:] = comm.rank
                average(x)
                results.append(bytes_of(x))
        assert_same(results)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", ["paper", "conserving"])
def test_late_ranks_have_the_same_bits(comm, late):
    """Rank 0 starts every version, the others call later; some vectors are in windows, or all."""
    for some in (False, True):
        results = []
        for make in WAYS:
            x = make(comm, np.zeros(100_003))
            y = np.zeros_like(x) if some and comm.rank % 2 else x
            with GroupAllreduce(
                comm, x, transport="shared", group_size=comm.size, sync_period=100, late=late
            ) as average:
                for t in range(3):
                    y += 2.0 ** (comm.rank + t)
                    comm.Barrier()
                    if comm.rank == 0:
                        average(y)
                    comm.Barrier()
                    if comm.rank > 0:
                        average(y)
                    results.append(bytes_of(y))
                average.synchronize(y)
                results.append(bytes_of(y))
        assert_same(results)


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("make", [copied, in_windows])
def test_nothing_is_lost_wherever_ranks_are(comm, make):
    """Timely or late by chance, what all have added is in the average over all ranks, exactly."""
    x = make(comm, np.zeros(300_001))
    random = np.random.default_rng(comm.rank)
    with GroupAllreduce(
        comm, x, transport="shared", group_size=2, sync_period=10**6, late="conserving"
    ) as average:
        for t in range(30):
            x += 16.0 * (comm.rank + t)
            if random.random() < 0.3:
                time.sleep(random.uniform(0, 3e-3))
            average(x)
        average.synchronize(x)
    added = 16.0 * sum(rank + t for rank in range(comm.size) for t in range(30)) / comm.size
    assert np.allclose(x, added, rtol=1e-12, atol=0)
    assert (x == x[0]).all()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", ["paper", "conserving"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("length", [1000, 400_003])
def test_an_interrupted_call_gives_the_vector_back(comm, length, first, late):
    """Nobody writes to it any more, and its contribution is in the others' averages."""
    results = []
    for make in WAYS:
        x = make(comm, np.zeros(length))
        with GroupAllreduce(
            comm,
            x,
            transport="shared",
            group_size=comm.size,
            sync_period=10**6,
            wait="group",
            late=late,
        ) as average:
            x[:] = comm.rank + 1
            average(x)
            mean = (comm.size + 1) / 2
            assert (x == mean).all()
            x += comm.rank
            if comm.rank == first:
                with interrupted():
                    average(x)
                assert (x == mean + comm.rank).all()
                x[:] = -7
            comm.Barrier()
            if comm.rank != first:
                average(x)
                assert (x == mean + (comm.size - 1) / 2).all()
            comm.Barrier()
            if comm.rank == first:
                assert (x == -7).all()
            for t in range(3):
                x += comm.rank + t
                average(x)
                results.append(bytes_of(x))
            average.synchronize(x)
            results.append(bytes_of(x))
    assert_same(results)


def by_messages(comm, like):
    """Return arrays that are sent."""
    return elsewhere(like)


def interrupted_without_a_contribution(comm, make, likes, **options):
    """Return vectors and a collective that has made calls, of which rank 0's last gave nothing.

    It was interrupted there, and the first array is not finite.
    """
    x = make(comm, likes)
    average = GroupAllreduce(
        comm,
        x,
        transport="messages" if make is by_messages else "shared",
        group_size=comm.size,
        sync_period=10**6,
        wait="group",
        late="conserving",
        **options,
    )
    average(x)  # after which the rank's snapshot holds nothing
    for array in x:
        array[:] = comm.rank + 1
    if comm.rank == 0:
        x[0][0] = np.nan
        with interrupted():
            average(x)
        assert np.isnan(x[0][0])
        assert all((array[1:] == 1).all() for array in x)
    comm.Barrier()
    if comm.rank > 0:
        assert average(x).weight == comm.size - 1
        np.testing.assert_allclose(x[0], mean_of_others(comm))
    comm.Barrier()
    return x, average


def mean_of_others(comm):
    return 1 + comm.size / 2


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("make", [*WAYS, by_messages])
@pytest.mark.parametrize("length", [1000, 400_003])
def test_an_interrupted_call_that_contributes_nothing_leaves_arrays_to_their_rank(
    comm, length, make
):
    """No other rank has those that versions leave out, nor what the application puts in next."""
    likes = [np.zeros(length), np.zeros(333)]
    x, average = interrupted_without_a_contribution(comm, make, likes, only_all_ranks=[1])
    with average:
        if comm.rank == 0:
            x[0][:], x[1][:] = 5, 7
        result = average(x)
        assert (result.timely, result.weight) == (True, comm.size)
        mean = (5 + (comm.size - 1) * mean_of_others(comm)) / comm.size
        np.testing.assert_allclose(x[0], mean)
        assert (x[1] == (comm.rank + 1 if comm.rank else 7)).all()
        average.synchronize(x)
        np.testing.assert_allclose(x[0], mean)
        np.testing.assert_allclose(x[1], (7 + sum(range(2, comm.size + 1))) / comm.size)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("make", [*WAYS, by_messages])
def test_after_such_a_call_a_vector_without_weight_is_kept(comm, make):
    """And is averaged with the others' where all weights are 0."""
    x, average = interrupted_without_a_contribution(comm, make, [np.zeros(1000)])
    with average:
        if comm.rank == 0:
            x[0][:] = 5
        before = bytes_of(x)
        assert average(x, weight=0).weight == 0
        assert bytes_of(x) == before
        average.synchronize(x)
        mean = (5 + (comm.size - 1) * mean_of_others(comm)) / comm.size
        np.testing.assert_allclose(x[0], mean)


@pytest.mark.ranks(3, 4)
def test_one_that_contributes_nothing_gets_the_mean_of_vectors_longer_than_a_ring(comm):
    """Others may be far ahead of it then."""
    length = 4_000_000
    x = through_memory(comm, np.zeros(length))
    settings = {"group_size": comm.size, "sync_period": 10**6, "wait": "group"}
    with GroupAllreduce(comm, x, transport="shared", **settings) as average:
        average(x)  # after which the rank's snapshot holds nothing
        for _ in range(3):
            x[:] = np.arange(length)
            x += comm.rank
            if comm.rank == 0:
                x[0] = np.nan
            average(x)
            np.testing.assert_allclose(x, np.arange(length) + comm.size / 2)


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("make", [copied, in_windows, by_slots])
@pytest.mark.parametrize("options", [{"wait": "group"}, {}], ids=["group", "nobody"])
def test_calls_are_interrupted_at_any_moment(comm, options, make):
    """Nobody writes to a vector after that, and nothing is lost, unless a change is not known."""
    x = make(comm, np.zeros(300_001))
    random = np.random.default_rng(comm.rank)
    with GroupAllreduce(
        comm,
        x,
        transport="shared",
        group_size=comm.size // 2,
        sync_period=10**6,
        late="conserving",
        **options,
    ) as average:
        for t in range(40):
            x += 16 * (1 + comm.rank)
            with contextlib.suppress(Interrupted), signalled(stop, random.uniform(1e-5, 3e-3)):
                average(x)
            if average.version == t:  # it was interrupted before it had begun
                average(x)
            if t % 5 == 0:
                kept = x.copy()
                time.sleep(random.uniform(0, 2e-3))
                assert (x == kept).all()
        average.synchronize(x)
        unknown = comm.allreduce(average.statistics().left_out)
        assert len(set(comm.allgather(bytes_of(x)))) == 1
        if not unknown:
            assert np.allclose(x, 40 * 16 * (comm.size + 1) / 2, rtol=1e-12, atol=0)


def stop():
    raise Interrupted


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", ["paper", "conserving"])
def test_a_stopped_rank_does_not_write_to_a_vector_that_was_given_back(comm, late):
    """It is stopped while it averages a block; after 1 s the interrupted call ends without it."""
    length = 4_000_000
    x = empty(comm, length, np.float64)
    averages = []

    def prepare():
        while averages:
            averages.pop().close()
        x[:] = 4.0 * comm.rank
        averages.append(
            GroupAllreduce(
                comm, x, transport="shared", group_size=comm.size, wait="group", late=late
            )
        )

    interrupt_in_the_middle(comm, prepare, lambda: averages[-1](x), [x], seconds=2)
    x[:] += comm.rank == 0
    after = x.copy()
    comm.Barrier()
    time.sleep(0.1)
    assert (x == after).all()
    averages[-1].synchronize(x)
    assert len(set(comm.allgather(bytes_of(x)))) == 1
    averages[-1].close()


@pytest.mark.ranks(1, 4)
def test_an_array_is_ordinary(comm):
    x = empty(comm, (3, 5), np.float32)
    assert x.shape == (3, 5)
    assert x.dtype == np.float32
    assert not x.any()
    assert x.flags.c_contiguous and x.flags.writeable
    x[1] = comm.rank
    comm.Barrier()
    assert (x[1] == comm.rank).all()
    several = empty_like(comm, [np.zeros(7), np.ones((2, 2), np.float16), np.zeros(0)])
    assert [(each.shape, each.dtype) for each in several] == [
        ((7,), np.float64),
        ((2, 2), np.float16),
        ((0,), np.float64),
    ]
    assert all(each.ctypes.data % 64 == 0 for each in several if each.size)


@pytest.mark.ranks(3)
def test_a_forked_process_changes_a_copy(comm):
    x = empty(comm, 1000, np.float64)
    x[:] = comm.rank
    child = os.fork()
    if child == 0:
        x[:] = 99
        os._exit(0 if (x == 99).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.Barrier()
    assert (x == comm.rank).all()
    with GroupAllreduce(comm, x, transport="shared", group_size=3, wait="group") as average:
        average(x)
    assert (x == 1).all()


@pytest.mark.ranks(3, 4)
def test_memory_is_freed_with_the_last_array(comm):
    gc.collect()
    comm.Barrier()
    windows.unmap_released()
    comm.Barrier()
    before = mapped()
    x = empty(comm, 2**18, np.float64)
    part = x[100:]
    with GroupAllreduce(comm, part, transport="shared", group_size=comm.size, wait="group"):
        assert mapped() >= before + comm.size * 2**21
    del x
    windows.unmap_released()
    assert mapped() >= before + comm.size * 2**21
    del part
    gc.collect()
    comm.Barrier()
    windows.unmap_released()
    assert mapped() == before


def mapped():
    """Return the bytes of windows that this process has mapped."""
    with open("/proc/self/maps") as file:
        places = [line.split()[0].split("-") for line in file if "memfd:wagma" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in places)


@pytest.mark.ranks(1, 4)
def test_there_may_be_no_memory_to_share(comm):
    """Then arrays are in each process's own memory, on all ranks alike."""
    if comm.rank == comm.size - 1:
        fail_after(0)
    try:
        x = empty(comm, 1000, np.float32)
    finally:
        fail_after(-1)
    assert not any(comm.allgather(is_shared(x)))
    x[:] = comm.rank
    with GroupAllreduce(comm, x, group_size=comm.size, wait="group") as average:
        average(x)
    assert (x == (comm.size - 1) / 2).all()


def is_shared(array):
    return windows.has(array.ctypes.data)


@pytest.mark.ranks(3, 4)
def test_one_rank_may_have_no_permission(comm):
    """Then nobody copies from or to other processes."""
    x = copied(comm, np.full(1000, float(comm.rank)))
    x[:] = comm.rank
    other_processes.refuses = comm.rank == 1
    with GroupAllreduce(comm, x, transport="shared", group_size=comm.size, wait="group") as average:
        average(x)
        assert average.statistics().in_place == 0
    assert (x == (comm.size - 1) / 2).all()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [(3, object, "dtype object"), ((2, -1), np.float32, "negative"), (3, "nothing", "nothing")],
)
def test_a_wrong_argument_raises_on_all_ranks(comm, shape, dtype, error):
    """Where one rank alone has given it, too."""
    wrong = comm.rank == 0
    with pytest.raises((TypeError, ValueError), match=error):
        empty(comm, shape if wrong else 3, dtype if wrong else np.float32)


@pytest.mark.ranks(3, 4)
def test_statistics_say_which_way_averages_went(comm):
    """By slots where vectors are short, in windows or not; 16 KiB are, for 3 members and more."""
    slots.set_longest()
    for count, by_slots in ((2048, 3), (2049, 0)):
        x = empty(comm, count, np.float64)
        with GroupAllreduce(
            comm, x, transport="shared", group_size=comm.size, wait="group"
        ) as average:
            average(x)
            average(x)
            average(np.zeros(count))
            assert average.statistics().in_slots == by_slots
            assert average.statistics().in_place == (0 if by_slots else 2)


@pytest.mark.ranks(3, 4)
def test_statistics_say_how_many_averages_were_in_place(comm):
    x = empty(comm, 1000, np.float64)
    y = np.zeros(1000)
    with GroupAllreduce(comm, x, transport="shared", group_size=comm.size, wait="group") as average:
        average(x)
        average(x)
        average(y)
        assert average.statistics().in_place == 2
        assert average.statistics().calls == 3


@pytest.mark.ranks(3, 4)
def test_nobody_waits_in_empty_for_a_rank_that_has_failed(comm):
    average = GroupAllreduce(comm, np.zeros(10))
    if comm.rank == 1:
        average.fail(OSError("the data are gone"))
    else:
        with pytest.raises(RankFailedError, match="data are gone"):
            empty(comm, 10)
        with pytest.raises(RankFailedError, match="data are gone"):
            empty_like(comm, np.zeros(3))
    average.close()
