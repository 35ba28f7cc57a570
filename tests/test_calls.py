"""Calls that are started and completed later, several collectives at once, and what is counted."""

import random
import time

import numpy as np
import pytest
from together import (
    NEVER,
    RULES,
    assert_equal_everywhere,
    bytes_of,
    compute_until,
    interrupted,
    vector_of,
    wait_until,
)

from collectives import ClosedError, CollectiveError, DisagreementError, GroupAllreduce

pytestmark = pytest.mark.mpi


def poll(handle, seconds=20):
    """Call test() until it says that the call is complete."""
    wait_until(handle.test, seconds)
    assert handle.test()
    return handle.wait()


# Calls that are started


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_a_started_call_does_what_calling_does(comm, late, engine):
    """Bit for bit in the vectors and in the results, in versions and in synchronizations."""
    outcomes = []
    for carry_out in (
        lambda average, x: average(x, weight=comm.rank + 1),
        lambda average, x: average.start(x, weight=comm.rank + 1).wait(),
        lambda average, x: poll(average.start(x, weight=comm.rank + 1)),
    ):
        mine = [np.zeros(1001, np.float16), np.zeros(70_001)]
        outcome = []
        with GroupAllreduce(
            comm,
            mine,
            group_size=2 if comm.size > 1 else 1,
            sync_period=3,
            wait="group",
            late=late,
            engine=engine,
        ) as average:
            for t in range(6):
                for array in mine:
                    array += vector_of(comm.rank, t, array.size).astype(array.dtype)
                outcome += [repr(carry_out(average, mine)), bytes_of(mine)]
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("kind", ["timely", "late", "synchronous"])
def test_a_started_call_completes_beside_the_application(comm, late, kind):
    """Rank 0 starts it and makes no other call; only its vector shows how far it is."""
    like = np.zeros(100_000)
    with GroupAllreduce(
        comm,
        like,
        group_size=comm.size,
        sync_period=1 if kind == "synchronous" else NEVER,
        late=late,
    ) as average:
        if kind == "late":
            if comm.rank == 1:
                average(np.ones(100_000))
            wait_until(lambda: average.executed == 1)
        comm.Barrier()
        mine = np.full(100_000, 4.0)
        request = None
        if comm.rank == 0:
            began = time.perf_counter()
            handle = average.start(mine)
            wait_until(lambda: mine[-1] != 4.0 and average.version == 1)
            assert handle.test()
            assert time.perf_counter() - began < 20
            result = handle.wait()
            assert (result.version, result.source, result.timely) == (0, 0, kind != "late")
            request = comm.Ibarrier()
        elif kind == "synchronous":
            time.sleep(0.1)
            average(np.zeros(100_000))
        expected = {
            "timely": 4 / comm.size,
            "synchronous": 4 / comm.size,
            "late": (1 + 4) / (comm.size + 1) if late == "paper" else 1 / comm.size + 4,
        }
        if comm.rank == 0:
            np.testing.assert_allclose(mine, expected[kind])
        (request or comm.Ibarrier()).Wait()


@pytest.mark.ranks(3, 4)
def test_calls_that_are_started_at_any_time_lose_no_update(comm):
    """Late ones too, also while a version runs; the application computes in between."""
    chance = random.Random(comm.rank)
    length = 50_000
    mine, added, kinds = np.zeros(length), np.zeros(length), set()
    with GroupAllreduce(comm, mine, group_size=2, sync_period=7, late="conserving") as average:
        for t in range(70):
            change = vector_of(comm.rank, t, length)
            mine += change
            added += change
            handle = average.start(mine)
            time.sleep(chance.random() * 0.003)
            result = handle.wait() if t % 2 else poll(handle)
            assert result.version == t
            kinds.add((result.synchronized, result.timely))
            if result.synchronized:
                assert_equal_everywhere(comm, mine)
                np.testing.assert_allclose(mine, comm.allreduce(added) / comm.size, atol=1e-12)
    assert set().union(*comm.allgather(kinds)) >= {(False, True), (False, False), (True, True)}


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("group_size", [2, 3])
def test_a_rank_that_starts_a_call_and_computes_holds_nobody_up(comm, late, group_size):
    """Every rank makes 60 calls while the last one neither waits for its first nor tests it."""
    stopped = comm.rank == comm.size - 1
    chance = random.Random(time.perf_counter_ns())
    mine = np.full(30_000, float(comm.rank))
    with GroupAllreduce(comm, mine, group_size=group_size, sync_period=NEVER, late=late) as average:
        handle = None
        if stopped:
            time.sleep(chance.random() * 0.02)
            handle = average.start(mine)
        for _ in range(60 * (not stopped)):
            average(mine)
        compute_until(comm, everybody_else_is_done=not stopped)
        if stopped:
            wait_until(lambda: average.version == 1)
            assert handle.test()
            assert handle.wait().version == 0
            assert average.executed == 60
            assert np.isfinite(mine).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["call", "start", "synchronize", "average", "publish", "close"])
@pytest.mark.parametrize("sync_period", [1, NEVER])
def test_whatever_follows_completes_a_started_call_first(comm, how, sync_period):
    average = GroupAllreduce(
        comm, np.zeros(3), group_size=comm.size, sync_period=sync_period, wait="group", late="paper"
    )
    first, then = np.full(3, float(comm.rank)), np.full(3, 10.0 + comm.rank)
    mean = np.full(3, (comm.size - 1) / 2)
    handle = average.start(first)
    following = {
        "call": lambda: average(then),
        "start": lambda: average.start(then),
        "synchronize": lambda: average.synchronize(then),
        "average": lambda: average.average(then),
        "publish": lambda: average.publish(then),
        "close": average.close,
    }[how]()
    np.testing.assert_allclose(first, mean)
    assert handle.test()
    if how == "start":
        following = following.wait()
    results = [handle.wait(), handle.wait()] + [following] * (how in ("call", "start"))
    assert [result.version for result in results] == [0, 0, 1][: len(results)]
    assert results[0] is results[1]
    assert all(result.weight == comm.size for result in results)
    if how not in ("publish", "close"):
        np.testing.assert_allclose(then, mean + 10)
    average.close()
    np.testing.assert_allclose(first, mean)
    assert handle.wait().version == 0


@pytest.mark.ranks(4)
def test_an_error_belongs_to_the_call_that_was_started(comm):
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=2, sync_period=1)
    if comm.rank == 2:
        with pytest.raises(DisagreementError, match="entered a periodic synchronization"):
            average.average(mine)
    else:
        handle = average.start(mine)
        for complete in (handle.wait, handle.wait, handle.test):
            with pytest.raises(DisagreementError, match=r"rank 2 entered average\(\)"):
                complete()
    average.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["close", "wait"])
def test_a_started_call_that_meets_a_closing_rank(comm, how):
    """Whether this rank waits for it or closes as well."""
    average = GroupAllreduce(comm, np.zeros(3), group_size=2, sync_period=1)
    if comm.rank != 1:
        handle = average.start(np.zeros(3))
        if how == "close":
            average.close()
        for _ in range(2):
            with pytest.raises(ClosedError, match=r"rank 1 entered close\(\)"):
                handle.wait()
    average.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sync_period", [1, NEVER])
def test_an_interrupted_wait_leaves_a_collective_that_can_be_closed(comm, sync_period):
    mine = np.full(10, float(comm.rank))
    average = GroupAllreduce(
        comm, mine, group_size=4, sync_period=sync_period, wait="group", late="paper"
    )
    if comm.rank == 0:
        handle = average.start(mine)
        with interrupted():
            handle.wait()
        for complete in (handle.wait, handle.test):
            with pytest.raises(CollectiveError, match="^the call was interrupted by Interrupted$"):
                complete()
        kept = mine.copy()
        request = comm.Ibarrier()
    else:
        comm.Ibarrier().Wait()
        assert average(mine).weight == 4
        np.testing.assert_allclose(mine, 1.5)
    average.close()
    if comm.rank == 0:
        request.Wait()
        np.testing.assert_array_equal(mine, kept)
    assert average.executed == 1


# Several collectives at once


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_two_models_are_averaged_at_once_with_slow_ranks_in_both(comm, engine):
    """A GAN: other sizes, groups and periods; rank 0 is slow in one, the last in the other."""
    chance = random.Random(comm.rank)
    generator, discriminator = np.zeros(1000), [np.zeros(3), np.zeros(40_000)]
    added = [0.0, 0.0]
    slow = [comm.rank == 0, comm.rank == comm.size - 1]
    period = [3, 4]
    with (
        GroupAllreduce(
            comm, generator, group_size=2, sync_period=3, late="conserving", engine=engine
        ) as first,
        GroupAllreduce(
            comm,
            discriminator,
            group_size=comm.size,
            sync_period=4,
            late="conserving",
            engine=engine,
        ) as second,
    ):
        models = [[generator], discriminator]
        calls = [lambda: first(generator), lambda: second(discriminator)]
        for t in range(24):
            # Ranks that wait for everybody do so in one order.
            waits = [(t + 1) % tau == 0 for tau in period]
            order = [0, 1] if all(waits) or chance.random() < 0.5 else [1, 0]
            for each in order:
                time.sleep(chance.random() * 0.001 * (1 + 4 * slow[each]))
                change = chance.random()
                added[each] += change
                for array in models[each]:
                    array += change
                result = calls[each]()
                assert (result.version, result.synchronized) == (t, waits[each])
            for each in (0, 1):
                if waits[each]:
                    expected = comm.allreduce(added[each]) / comm.size
                    assert_equal_everywhere(comm, models[each])
                    for array in models[each]:
                        np.testing.assert_allclose(array, expected, atol=1e-12)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("how", ["call", "test", "average", "join", "close"])
def test_without_a_thread_waiting_in_one_collective_serves_the_other(comm, how):
    """Rank 0 waits in the first for ranks that need it in the second before they come."""
    x, y = np.full(50_000, float(comm.rank)), np.full(70_000, float(comm.rank))
    mean = (comm.size - 1) / 2
    first = GroupAllreduce(comm, x, group_size=comm.size, sync_period=1, engine="none")
    second = GroupAllreduce(comm, y, group_size=comm.size, sync_period=NEVER, engine="none")
    if comm.rank != 0:
        for _ in range(3):
            second(y)
        np.testing.assert_allclose(y, mean)
    {
        "call": lambda: first(x),
        "test": lambda: poll(first.start(x)),
        "average": lambda: first.average(x),
        "join": lambda: first.join(x),
        "close": first.close,
    }[how]()
    if how != "close":
        np.testing.assert_allclose(x, mean)
    first.close()
    second.close()
    assert second.executed == 3


# What is counted


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("length", [1, 400_000])
def test_statistics_of_a_known_run(comm, transport, late, length):
    """Rank 0 calls three times alone, then the others once; in the end all synchronize."""
    mine = np.zeros(length, np.float32)
    # A short vector is sent twice, in whole lines of 64 bytes after one with weight and count; of a
    # long one every rank sends three slices of four, and its own, averaged, to three others; and
    # these two. average() sends slices where vectors are in shared memory, but all else nothing.
    sent = 2 * 128 if length == 1 else 6 * length + 3 * 16
    shown = sent
    if transport == "shared":
        sent = 0
        if length == 1:
            # All of the single line is rank 0's slice.
            shown = 3 * 16 + (3 * 64 if comm.rank == 0 else 64)
    with GroupAllreduce(comm, mine, group_size=4, sync_period=NEVER, late=late) as average:
        nothing = average.statistics()
        assert nothing == (0, 0, 0, 0, 0, (), 0, 0, 0, 0, 0.0, 0.0, nothing.engine)
        comm.Barrier()
        for _ in range(3 * (comm.rank == 0)):
            average(mine)
        wait_until(lambda: average.executed == 3)
        comm.Barrier()
        now = average.statistics()
        first = comm.rank == 0
        assert (now.calls, now.timely) == ((3, 3) if first else (0, 0))
        assert (now.versions, now.passive) == (3, 0 if first else 3)
        assert now.staleness == ((3,) if first else (0, 1, 1, 1))
        assert now.bytes_sent == 3 * sent
        # Nobody needs the engine of a rank whose memory it can use.
        assert now.engine > 0 or (transport == "shared" and not first)
        if not first:
            average(mine)
        now = average.statistics()
        assert (now.calls, now.timely) == ((3, 3) if first else (1, 0))
        assert now.versions == 3
        comm.Barrier()
        if first:
            average(mine, weight=np.float32(0))
        wait_until(lambda: average.executed == 4)
        comm.Barrier()
        now = average.statistics()
        # What the others published in call 0 is three versions old in version 3.
        assert now.staleness == ((4,) if first else (0, 1, 1, 2))
        for _ in range(3 * (not first)):
            average(mine)
        mine[0] = np.nan if comm.rank == 2 else 0
        average.synchronize(mine)
        now = average.statistics()
        assert (now.synchronizations, now.versions) == (1, 4)
        assert now.left_out == (comm.rank == 2)
        assert now.bytes_sent == 5 * sent
        average.average(mine)
        now = average.statistics()
        assert (now.synchronizations, now.versions) == (1, 4)
        assert now.bytes_sent == 5 * sent + shown


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_statistics_agree_with_what_calls_returned(comm, transport, late, wait):
    chance = random.Random(comm.rank)
    period, steps = 5, 43
    mine, timely = np.zeros(100), 0
    with GroupAllreduce(
        comm, mine, group_size=min(2, comm.size), sync_period=period, wait=wait, late=late
    ) as average:
        for _ in range(steps):
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.003)
            timely += average(mine).timely
        average.synchronize(mine)
        now = average.statistics()
        periodic = steps // period
        assert (now.calls, now.timely) == (steps, timely)
        assert now.synchronizations == periodic + 1
        assert now.versions == steps - periodic
        assert sum(now.staleness) == now.versions
        assert now.staleness[0] == now.versions - now.passive
        assert len(now.staleness) <= period
        if wait == "group":
            assert (now.passive, now.timely) == (0, steps)
            assert now.staleness == (now.versions,)
        assert (now.bytes_sent > 0) == (comm.size > 1 and transport == "messages")


@pytest.mark.ranks(3, 4)
def test_a_rank_that_has_joined_makes_no_calls(comm):
    """It takes part in the others' synchronizations, which are counted; close() counts nothing."""
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=2, sync_period=3)
    calls = 1 if comm.rank == 0 else 6
    for _ in range(calls):
        average(mine)
    average.join(mine)
    joined = average.statistics()
    comm.Barrier()
    if comm.rank == 1:
        time.sleep(0.2)
    average.close()
    assert joined.calls == calls
    assert joined.timely <= calls
    # Two periodic ones and the last; four versions between them.
    assert (joined.synchronizations, joined.versions, average.version) == (3, 4, 6)
    # Only the progress thread's time goes on.
    assert average.statistics()[:-1] == joined[:-1]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["call", "start"])
def test_times_in_calls_are_waiting_and_communicating(comm, how):
    """Rank 1 comes late, by a known time, to a synchronization, and later to close()."""
    late = 1.2
    mine = np.zeros(300_000)
    average = GroupAllreduce(comm, mine, group_size=2, sync_period=1)
    comm.Barrier()
    began = time.perf_counter()
    if comm.rank == 1:
        time.sleep(late)
    if how == "start":
        average.start(mine)
    average(mine)
    took = time.perf_counter() - began
    now = average.statistics()
    if comm.rank != 1:
        assert now.waiting > 0.1 * late
    assert now.communicating > 0
    assert now.engine > 0
    assert now.waiting + now.communicating <= took
    if comm.rank == 1:
        time.sleep(late)
    average.close()
    closed = average.statistics()
    assert closed.waiting == now.waiting
    assert closed.communicating == now.communicating
