"""GroupAllreduce under mpiexec: what it averages, whom it waits for, how it ends, what it says."""

import random
import time

import numpy as np
import pytest
from together import NEVER, RULES, assert_equal_everywhere, compute_until, interrupted

from collectives import ClosedError, DisagreementError, GroupAllreduce, RankFailedError
from collectives.topology import group_of, groups

pytestmark = pytest.mark.mpi

READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False
UNALIGNED = np.zeros(25, np.uint8)[1:].view(np.float64)


def vector_of(rank, t, length, dtype=np.float64):
    return np.random.default_rng((rank, t)).normal(size=length).astype(dtype)


def assert_same_error_everywhere(comm, kind, make):
    with pytest.raises(kind) as caught:
        make()
    assert len(set(comm.allgather(str(caught.value)))) == 1
    return str(caught.value)


# What is averaged


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 1000, 300_001])
def test_a_group_of_all_ranks_gets_the_mean_bitwise_equal(comm, late, dtype, length):
    mine = vector_of(comm.rank, 0, length, dtype)
    expected = np.mean([vector_of(r, 0, length, dtype) for r in range(comm.size)], 0)
    with GroupAllreduce(
        comm, np.zeros(length, dtype), group_size=comm.size, wait="group", late=late
    ) as average:
        result = average(mine)
        assert_equal_everywhere(comm, mine)
    np.testing.assert_allclose(
        mine, expected, rtol=1e-5 if dtype is np.float32 else 1e-12, atol=1e-6
    )
    assert (result.version, result.source, result.timely) == (0, 0, True)
    assert (result.group, result.weight) == (tuple(range(comm.size)), comm.size)
    assert not result.synchronized


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_waiting_for_the_group_is_model_averaging_in_that_versions_group(comm, late, group_size):
    group_size, sync_period, steps, length = min(group_size, comm.size), 5, 13, 50
    models = np.zeros((comm.size, length))
    mine = models[comm.rank].copy()
    with GroupAllreduce(
        comm, mine, group_size=group_size, sync_period=sync_period, wait="group", late=late
    ) as average:
        for t in range(steps):
            mine += vector_of(comm.rank, t, length)
            models += [vector_of(r, t, length) for r in range(comm.size)]
            synchronous = (t + 1) % sync_period == 0
            everyone = [tuple(range(comm.size))]
            for members in everyone if synchronous else groups(comm.size, group_size, t):
                models[list(members)] = models[list(members)].mean(0)
            result = average(mine)
            assert result.synchronized == synchronous
            group = everyone[0] if synchronous else group_of(comm.rank, comm.size, group_size, t)
            assert result.group == group
            np.testing.assert_allclose(mine, models[comm.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("wait", ["group", "nobody"])
def test_fixed_groups_are_those_of_version_0_and_meet_at_synchronizations_alone(comm, wait):
    """What a rank puts in is one in its own place: the others' places say who has been met."""
    size, mine = comm.size, np.zeros(comm.size)
    group = group_of(comm.rank, size, 2, 0)
    outside = [rank for rank in range(size) if rank not in group]
    generator = np.random.default_rng(comm.rank)
    with GroupAllreduce(
        comm, mine, group_size=2, sync_period=7, groups="fixed", wait=wait
    ) as average:
        assert average.groups == "fixed"
        for t in range(21):
            mine[comm.rank] += 1
            if wait == "nobody":
                time.sleep(0.004 * generator.random())
            before = mine[outside].copy()
            result = average(mine)
            assert result.group == (tuple(range(size)) if result.synchronized else group)
            if result.synchronized:
                np.testing.assert_allclose(mine, (t + 1) / size, rtol=1e-12)
            elif len(group) == 2:
                assert np.all(mine[list(group)] > 0) or wait == "nobody"
                assert np.ptp(mine[outside]) < 1e-12 and np.allclose(mine[outside], before)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_waiting_for_the_group_is_bitwise_repeatable(comm, late):
    def run():
        chance = random.Random(time.perf_counter_ns())
        mine = np.zeros(100)
        with GroupAllreduce(
            comm, mine, group_size=2, sync_period=4, wait="group", late=late
        ) as average:
            for t in range(10):
                mine += vector_of(comm.rank, t, 100)
                time.sleep(chance.random() * 0.003)
                average(mine)
        return mine.tobytes()

    assert run() == run()


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
def test_after_every_synchronization_all_ranks_are_bitwise_equal(comm, late):
    chance = random.Random(comm.rank)
    mine = np.zeros(1000, np.float32)
    with GroupAllreduce(
        comm, mine, group_size=(comm.size + 1) // 2, sync_period=4, late=late
    ) as average:
        for t in range(40):
            mine += vector_of(comm.rank, t, 1000, np.float32)
            time.sleep(chance.random() * 0.002)
            result = average(mine)
            assert result.synchronized == (t % 4 == 3)
            if result.synchronized:
                assert_equal_everywhere(comm, mine)


@pytest.mark.ranks(3, 4, 8)
def test_conserving_loses_no_update_and_counts_none_twice(comm):
    chance = random.Random(comm.rank)
    mine = np.zeros(10)
    added = np.zeros(10)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=7, late="conserving") as average:
        timely = 0
        for t in range(70):
            change = vector_of(comm.rank, t, 10)
            mine += change
            added += change
            time.sleep(chance.random() * 0.002 * (1 + 4 * (comm.rank == 0)))
            result = average(mine)
            timely += result.timely
            if result.synchronized:
                np.testing.assert_allclose(mine, comm.allreduce(added) / comm.size, atol=1e-12)
    # The test says nothing unless many were late.
    assert comm.allreduce(timely) < 70 * comm.size


@pytest.mark.ranks(3, 4)
def test_vectors_are_never_torn_and_timely_means_present(comm):
    """Part r of the vector is what rank r contributes: t + 1 in its own call t, else older."""
    calls, width = 1500, 64
    chance = random.Random(comm.rank)
    before = np.zeros(comm.size * width)
    seen = set()
    with GroupAllreduce(
        comm, before, group_size=comm.size, sync_period=NEVER, late="paper"
    ) as average:
        for t in range(calls):
            mine = np.zeros(comm.size * width)
            mine[comm.rank * width : (comm.rank + 1) * width] = t + 1
            if chance.random() < 0.3:
                time.sleep(chance.random() * 3e-4)
            result = average(mine)
            seen.add(result.timely)
            if result.timely:
                sums = (mine * comm.size).reshape(comm.size, width)
            else:
                own = np.zeros((comm.size, width))
                own[comm.rank] = t + 1
                sums = mine.reshape(comm.size, width) * (comm.size + 1) - own
            sums = np.rint(sums)
            assert (sums == sums[:, :1]).all(), f"torn in call {t}"
            assert (sums[comm.rank, 0] == t + 1) == result.timely
            assert (result.source == t) or not result.timely
            assert result.source >= t
    assert set().union(*comm.allgather(seen)) == {True, False}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_a_late_rank_gets_what_the_rule_says(comm, late):
    """Rank 0 overtakes the others by one version; then they arrive, one after another."""
    like = np.full(5, 10.0 * comm.rank)
    mine = like + 1 + comm.rank
    contributed = [1.0, 10.0, 20.0, 30.0]
    mean = np.mean(contributed)
    with GroupAllreduce(comm, like, group_size=4, sync_period=NEVER, late=late) as average:
        if comm.rank == 0:
            result = average(mine)
            assert result.timely
            np.testing.assert_array_equal(mine, mean)
        comm.Barrier()
        if comm.rank > 0:
            result = average(mine)
            assert not result.timely
            assert (result.version, result.source) == (0, 0)
            x = 10.0 * comm.rank + 1 + comm.rank
            paper = (4 * mean + x) / 5
            conserving = mean + 1 + comm.rank
            np.testing.assert_allclose(mine, paper if late == "paper" else conserving)
        assert result.weight == 4


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_the_initial_vector_is_contributed_until_one_is_published(comm, late):
    like = np.full(3, float(comm.rank))
    with GroupAllreduce(comm, like, group_size=comm.size, sync_period=NEVER, late=late) as average:
        like[:] = np.nan  # it was copied
        if comm.rank == 0:
            mine = np.full(3, 100.0)
            average(mine)
            np.testing.assert_allclose(mine, (100 + sum(range(1, comm.size))) / comm.size)
        comm.Barrier()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_publish_replaces_what_is_contributed_without_taking_part(comm, late):
    with GroupAllreduce(
        comm, np.zeros(3), group_size=comm.size, sync_period=NEVER, late=late
    ) as average:
        average.publish(np.full(3, 7.0))
        assert average.version == 0
        comm.Barrier()
        if comm.rank == 0:
            mine = np.zeros(3)
            average(mine)
            np.testing.assert_allclose(mine, 7.0 * (comm.size - 1) / comm.size)
        comm.Barrier()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("late", RULES)
def test_synchronize_and_average_between_two_calls(comm, late):
    mine = np.full(3, float(comm.rank))
    mean = np.mean(range(comm.size))
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER, late=late) as average:
        average(mine)
        copy = mine.copy()
        average.average(copy)
        np.testing.assert_allclose(copy, mean)
        np.testing.assert_array_equal(mine, comm.rank)
        mine += 1
        average.synchronize(mine)
        np.testing.assert_allclose(mine, mean + 1)
        assert_equal_everywhere(comm, mine)
        assert average.version == 1


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
        assert average.statistics().nonfinite == (comm.rank == 0)
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
        assert average.statistics().nonfinite == 3 * (comm.rank == 0)


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


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("broken", [False, True])
def test_average_shows_what_synchronize_would_give(comm, late, broken):
    chance = random.Random(comm.rank)
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, late=late) as average:
        for t in range(10):
            mine += vector_of(comm.rank, t, 3)
            time.sleep(chance.random() * 0.002)
            average(mine)
        mine += 1
        if broken and comm.rank == 0:
            mine[1] = np.nan
        shown = mine.copy()
        average.average(shown)
        average.synchronize(mine)
        np.testing.assert_array_equal(shown, mine)
        assert np.isfinite(shown).all()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("how", ["average", "synchronize"])
def test_a_change_may_overflow_where_the_vector_does_not(comm, late, how):
    """The vector replaces what is still the initial one: no change is taken."""
    mine = np.full(4, 3e38, np.float32)
    with GroupAllreduce(comm, -mine, group_size=1, sync_period=NEVER, late=late) as average:
        getattr(average, how)(mine)
        np.testing.assert_allclose(mine, 3e38, rtol=1e-6)
        assert average.statistics().nonfinite == 0


@pytest.mark.ranks(3, 4)
def test_under_conserving_publishing_loses_nothing(comm):
    chance = random.Random(comm.rank)
    mine = np.zeros(5)
    added = np.zeros(5)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, late="conserving") as average:
        for t in range(60):
            change = vector_of(comm.rank, t, 5)
            mine += change
            added += change
            time.sleep(chance.random() * 0.001)
            if chance.random() < 0.5:
                average.publish(mine)
                change = vector_of(comm.rank + comm.size, t, 5)
                mine += change
                added += change
            average(mine)
        average.synchronize(mine)
        np.testing.assert_allclose(mine, comm.allreduce(added) / comm.size, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", RULES)
def test_a_vector_that_was_returned_is_written_no_more(comm, late):
    """Rank 2 publishes while the others run versions, and keeps what its calls returned."""
    with GroupAllreduce(comm, np.zeros(50), group_size=2, sync_period=NEVER, late=late) as average:
        kept = []
        if comm.rank == 2:
            for t in range(200):
                returned = np.full(50, float(t))
                average(returned)
                kept.append((returned, returned.copy()))
                for _ in range(5):
                    average.publish(np.full(50, -1.0))
        else:
            for t in range(1000):
                average(np.full(50, float(t)))
        comm.Barrier()
        for returned, copy in kept:
            np.testing.assert_array_equal(returned, copy)


# Whom it waits for


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
def test_no_call_waits_for_a_rank_that_computes(comm, late):
    stopped = comm.size - 1
    mine = np.full(10_000, float(comm.rank))
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, late=late) as average:
        for _ in range(50 * (comm.rank != stopped)):
            average(mine)
        compute_until(comm, everybody_else_is_done=comm.rank != stopped)
        assert average.version == (0 if comm.rank == stopped else 50)


@pytest.mark.ranks(4)
def test_without_a_progress_thread_calls_still_complete(comm, monkeypatch):
    monkeypatch.setenv("WAGMA_ENGINE", "none")
    mine = np.zeros(100)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=5) as average:
        for _ in range(25):
            mine += 1
            average(mine)
        np.testing.assert_allclose(mine, 25)


@pytest.mark.ranks(4)
def test_several_collectives_are_served_at_once(comm):
    with (
        GroupAllreduce(comm, np.zeros(3), group_size=2, sync_period=5) as first,
        GroupAllreduce(comm, np.zeros(7), group_size=4, sync_period=3) as second,
    ):
        a, b = np.zeros(3), np.zeros(7)
        for _ in range(15):
            a += 1
            b += 2
            first(a)
            second(b)
        np.testing.assert_allclose(a, 15)
        np.testing.assert_allclose(b, 30)


# How it ends


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


# What it says


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize(
    ("kind", "message", "settings"),
    [
        (ValueError, "group_size is 0, not between 1 and", {"group_size": 0}),
        (ValueError, "group_size is 99, not between 1 and", {"group_size": 99}),
        (TypeError, "group_size is 1.5, not an integer", {"group_size": 1.5}),
        (ValueError, "sync_period is 0, less than 1", {"sync_period": 0}),
        (TypeError, "sync_period is None, not an integer", {"sync_period": None}),
        (ValueError, "wait is 'all', not one of nobody, group", {"wait": "all"}),
        (ValueError, "late is 'lost', not one of paper, conserving", {"late": "lost"}),
        (TypeError, "like is a float, not a numpy array", {"like": 1.0}),
        (TypeError, "like is of dtype int64", {"like": np.zeros(3, np.int64)}),
        (TypeError, "like is of dtype >f8", {"like": np.zeros(3, ">f8")}),
        (ValueError, "like has 2 dimensions", {"like": np.zeros((3, 3))}),
        (ValueError, "like is empty", {"like": np.zeros(0)}),
        (ValueError, "like is not contiguous", {"like": np.zeros(6)[::2]}),
        (ValueError, "like is not aligned", {"like": UNALIGNED}),
        (ValueError, "like is read-only", {"like": np.broadcast_to(0.0, 1)}),
    ],
)
@pytest.mark.parametrize("wrong_rank", [0, -1])
def test_wrong_arguments_on_one_rank_raise_on_all(comm, kind, message, settings, wrong_rank):
    wrong_rank %= comm.size
    right = {"like": np.zeros(3), "group_size": 1}
    arguments = {**right, **(settings if comm.rank == wrong_rank else {})}
    like = arguments.pop("like")
    text = assert_same_error_everywhere(comm, kind, lambda: GroupAllreduce(comm, like, **arguments))
    assert text.startswith(message if comm.size == 1 else f"rank {wrong_rank}: {message}")


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("name", "settings", "values"),
    [
        ("length", {"like": np.zeros(4)}, "3 on ranks 0, 2(-3)?; 4 on rank 1"),
        ("dtype", {"like": np.zeros(3, np.float32)}, "float64 on ranks.*; float32 on rank 1"),
        ("group_size", {"group_size": 2}, "1 on ranks.*; 2 on rank 1"),
        ("sync_period", {"sync_period": 7}, "10 on ranks.*; 7 on rank 1"),
        ("wait", {"wait": "group"}, "nobody on ranks.*; group on rank 1"),
        ("late", {"late": "paper"}, "conserving on ranks.*; paper on rank 1"),
    ],
)
def test_settings_that_differ_raise_on_all_and_name_ranks_and_values(comm, name, settings, values):
    arguments = {"like": np.zeros(3), "group_size": 1, "late": "conserving"}
    arguments.update(settings if comm.rank == 1 else {})
    like = arguments.pop("like")
    with pytest.raises(ValueError, match=f"{name} differs between ranks: {values}"):
        GroupAllreduce(comm, like, **arguments)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "message", "wrong"),
    [
        (TypeError, "the vector is a list, not a numpy array", [0.0, 0.0, 0.0]),
        (
            TypeError,
            "the vector is of dtype float32, the collective's of float64",
            np.zeros(3, "f"),
        ),
        (TypeError, "the vector is of dtype int64", np.zeros(3, np.int64)),
        (ValueError, "the vector has 4 elements, the collective's have 3", np.zeros(4)),
        (ValueError, "the vector has 2 dimensions, not one", np.zeros((3, 1))),
        (ValueError, "the vector is not contiguous", np.zeros(6)[::2]),
        (ValueError, "the vector is not aligned", UNALIGNED),
        (ValueError, "the vector is read-only", READ_ONLY),
    ],
)
def test_a_wrong_vector_raises_and_the_other_ranks_learn_of_it(comm, kind, message, wrong):
    """Also those that wait in a synchronization, to which rank 1 will never come."""
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=10_000) as average:
        if comm.rank == 1:
            with pytest.raises(kind, match=message):
                average(wrong)
            assert average.version == 0
            with pytest.raises(ClosedError, match="this rank failed in an earlier call"):
                average(mine)
        else:
            with pytest.raises(
                RankFailedError, match=f"rank 1 failed, .* {kind.__name__}: {message}"
            ):
                if comm.rank == 2:
                    average.synchronize(mine)
                for _ in range(5000):
                    average(mine)
                    time.sleep(0.001)


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
