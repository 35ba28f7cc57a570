"""Going on from a checkpoint, and ranks that have fewer calls to make than others."""

import contextlib
import random
import time

import numpy as np
import pytest
from together import (
    NEVER,
    RULES,
    assert_equal_everywhere,
    interrupt_in_the_middle,
    interrupted,
    wait_until,
)

import collectives
from collectives import (
    ClosedError,
    DisagreementError,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
    RankFailedError,
    ReadyGroupAllreduce,
)
from collectives.topology import group_of, groups

pytestmark = pytest.mark.mpi

LENGTH = 7


def change_of(rank, epoch, t):
    return np.random.default_rng((rank, epoch, t)).normal(size=LENGTH)


# join()


def after_joining(start, epoch, calls, group_size, period, late):
    """Return what all ranks have after an epoch in which each makes so many calls, then joins.

    Under the conserving rule, by conservation: of every period, the mean of the changes of those
    that had not joined before it. Under the paper's, where all wait for their groups, model
    averaging among those that have not joined.
    """
    size, last = len(calls), max(calls)
    models = np.array([start] * size)
    active = np.full(size, True)
    for t in range(last):
        calling = np.array(calls) > t
        models[calling] += [change_of(rank, epoch, t) for rank in np.flatnonzero(calling)]
        if late == "paper":
            active = calling
        if (t + 1) % period == 0:
            models[:] = models[active].mean(0)
            active = calling
        elif late == "paper":
            for members in map(list, groups(size, group_size, t)):
                if active[members].any():
                    models[members] = models[[r for r in members if active[r]]].mean(0)
    if late == "paper":
        active = np.array(calls) == last
    return models[active | (np.array(calls) == last)].mean(0)


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize(
    ("wait", "engine"), [("nobody", "adaptive"), ("group", "adaptive"), ("nobody", "none")]
)
def test_ranks_with_fewer_calls_join_and_all_end_with_one_vector(comm, late, wait, engine):
    """Two epochs of random lengths, some of no call at all, for each group size."""
    sleep = random.Random(comm.rank)
    for group_size in sorted({1, min(2, comm.size), comm.size}):
        period = 4
        mine, expected, version = np.zeros(LENGTH), np.zeros(LENGTH), 0
        with GroupAllreduce(
            comm,
            mine,
            group_size=group_size,
            sync_period=period,
            wait=wait,
            late=late,
            engine=engine,
        ) as average:
            for epoch in range(3):
                chance = random.Random(100 * group_size + 10 * epoch + comm.size)
                calls = [chance.choice((0, chance.randrange(12))) for _ in range(comm.size)]
                # The reference counts from 0, so each epoch begins with a period.
                average.load(mine, 0)
                for t in range(calls[comm.rank]):
                    mine += change_of(comm.rank, epoch, t)
                    time.sleep(sleep.random() * 0.001)
                    result = average(mine)
                    assert (result.version, result.synchronized) == (t, t % period == period - 1)
                average.join(mine)
                version = max(calls)
                assert (average.version, average.executed) == (version, version), calls
                assert_equal_everywhere(comm, mine)
                if late == "conserving" or wait == "group":
                    expected = after_joining(expected, epoch, calls, group_size, period, late)
                    np.testing.assert_allclose(
                        mine, expected, atol=1e-12, err_msg=f"{group_size=} {calls=} {epoch=}"
                    )


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
def test_a_rank_that_has_joined_has_weight_0(comm, late):
    """At once, or under the conserving rule from the next synchronization on, with its updates."""
    size = comm.size
    mine = np.zeros(3)
    with GroupAllreduce(
        comm, mine, group_size=size, sync_period=3, wait="group", late=late
    ) as average:
        average(mine)
        mine += size if comm.rank == 0 else 0
        if comm.rank == 0:
            average.join(mine)
        else:
            weights = [average(mine).weight for _ in range(5)]
            before = size if late == "conserving" else size - 1
            assert weights == [before, before, size - 1, size - 1, size - 1]
            np.testing.assert_allclose(mine, 1 if late == "conserving" else 0)
            mine += 1
            average.join(mine)
        np.testing.assert_allclose(mine, 2 if late == "conserving" else 1)
        assert_equal_everywhere(comm, mine)
        result = average(mine)
        assert (result.version, result.weight) == (6, size)
        average.join(mine)
        assert average.version == 7


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_a_rank_that_has_joined_takes_part_in_what_the_others_do(comm, late):
    """average(), synchronize() and started calls, before and after periodic synchronizations."""
    mine = np.zeros(3)
    # The paper's rule loses updates of late ranks.
    wait = "group" if late == "paper" else "nobody"
    with GroupAllreduce(comm, mine, group_size=2, sync_period=2, wait=wait, late=late) as average:
        if comm.rank == 1:
            mine += 1
            average.join(mine)
        else:
            for _ in range(4):
                shown = mine.copy()
                average.average(shown)
                average.synchronize(mine)
                np.testing.assert_array_equal(shown, mine)
                mine += 1
                average.start(mine).wait()
            assert average.executed == 4
            average.join(mine)
        assert (average.version, average.executed) == (4, 4)
        assert_equal_everywhere(comm, mine)
        conserved = 4 + 1 / comm.size
        np.testing.assert_allclose(mine, conserved if late == "conserving" else 4)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_joining_completes_a_started_call_first(comm, late):
    mine = np.full(3, float(comm.rank))
    with GroupAllreduce(
        comm, np.zeros(3), group_size=comm.size, sync_period=NEVER, wait="group", late=late
    ) as average:
        handle = average.start(mine)
        average.join(mine)
        assert handle.test()
        assert handle.wait().version == 0
        np.testing.assert_allclose(mine, (comm.size - 1) / 2)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("joins", [0, 1])
@pytest.mark.parametrize("what", ["close", "load"])
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_joining_while_others_close_or_load_names_the_ranks(comm, joins, what, engine):
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, engine=engine)
    average(mine)
    last = comm.size - 1
    others = f"ranks 1-{last}" if joins == 0 else "ranks 0, 2" + "-3" * (last == 3)
    if comm.rank == joins:
        message = {"close": r"close\(\)", "load": r"load\(\) of version 7"}[what]
        kind = ClosedError if what == "close" else DisagreementError
        with pytest.raises(kind, match=f"rank {joins} waits in join.*{others} entered {message}"):
            average.join(mine)
    elif what == "load":
        with pytest.raises(DisagreementError, match=rf"rank {joins} entered join\(\) after 1 call"):
            average.load(mine, 7)
    average.close()
    assert average.closed


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
def test_an_interrupted_join_loses_nothing(comm):
    """Rank 1 stops while the last average is exchanged, and rank 0 is interrupted in it."""
    mine = np.zeros(3_000_000)
    with contextlib.ExitStack() as stack:
        made = []

        def prepare():
            mine[:] = 0
            average = GroupAllreduce(
                comm, mine, group_size=comm.size, sync_period=NEVER, wait="group", late="conserving"
            )
            made.append(stack.enter_context(average))
            average(mine)
            mine[:] += (0, 3, 9, 12)[comm.rank]

        interrupt_in_the_middle(comm, prepare, lambda: made[-1].join(mine), [mine])
        made[-1].synchronize(mine)
        np.testing.assert_array_equal(mine, 6)


@pytest.mark.ranks(4)
def test_a_rank_that_has_joined_hears_of_a_failure(comm):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
        if comm.rank == 2:
            average.fail(KeyError("the dataset is gone"))
        else:
            with pytest.raises(RankFailedError, match="rank 2 failed.*the dataset is gone"):
                average.join(mine)


# Several at once


def made(comm, kind, vector):
    """Return a collective, in which ranks with more calls wait for those with fewer."""
    if kind in (GroupAllreduce, PartialAllreduce):
        return kind(comm, vector, sync_period=5)
    if kind is ReadyGroupAllreduce:  # nobody is left over
        return kind(comm, vector, group_size=comm.size)
    return kind(comm, vector)


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("shared")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (GroupAllreduce, GroupAllreduce),
        (GroupAllreduce, PartialAllreduce),
        (NeighborAverage, PushSum),
        (PairwiseAverage, GroupAllreduce),
        (ParameterServer, NeighborAverage),
        (ReadyGroupAllreduce, PairwiseAverage),
    ],
)
def test_ranks_with_fewer_calls_of_several_collectives_join_all_at_once(comm, first, second):
    x, y = np.zeros(LENGTH), np.zeros(LENGTH)
    with made(comm, first, x) as a, made(comm, second, y) as b:
        calls = 10 + 7 * ((comm.rank + 1) % comm.size)
        for t in range(calls):
            x += change_of(comm.rank, 0, t)
            y += change_of(comm.rank, 1, t)
            a(x)
            b(y)
        collectives.join((a, x), (b, y))
        assert a.version == b.version == 10 + 7 * (comm.size - 1)
        assert_equal_everywhere(comm, x)
        if second is not PartialAllreduce:  # of which each has what it has not yet got
            assert_equal_everywhere(comm, y)
        a(x)
        b(y)


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("messages")
def test_ranks_that_wait_in_a_circle_of_joins_say_so_and_nobody_hangs(comm):
    """Rank 0 has fewer calls, and joins one collective before the other."""
    x, y = np.zeros(LENGTH), np.zeros(LENGTH)
    made = [GroupAllreduce(comm, vector, group_size=2, sync_period=5, stall=0) for vector in (x, y)]
    with pytest.raises((ClosedError, DisagreementError, RankFailedError)) as raised:
        for _ in range(10 + 10 * (comm.rank > 0)):
            made[0](x)
            made[1](y)
        made[1].join(y)
        made[0].join(x)
    said = comm.allgather(str(raised.value))
    assert any(
        " waits in a periodic synchronization after 14 calls for rank 0, which waits in join() of "
        "another collective for this rank: join both at once (collectives.join, or `with" in text
        for text in said
    )
    for collective in made:
        collective.close()


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("messages")
def test_a_circle_is_found_where_a_collective_has_not_been_called(comm):
    x, y = np.zeros(LENGTH), np.zeros(LENGTH)
    a, b = [GroupAllreduce(comm, vector, stall=0) for vector in (x, y)]
    with pytest.raises((ClosedError, DisagreementError, RankFailedError)) as raised:
        if comm.rank > 0:
            b.synchronize(y)
        a.join(x)
        b.join(y)
    assert any("join both at once" in text for text in comm.allgather(str(raised.value)))
    a.close()
    b.close()


@pytest.mark.ranks(3)
@pytest.mark.transports("messages")
def test_a_circle_is_found_where_a_join_first_waits_for_a_version(comm):
    """Rank 0 cannot publish before a version of long vectors has been executed."""
    x, y = np.zeros(LENGTH), np.zeros(1 << 22)
    a, b = [GroupAllreduce(comm, vector, group_size=3, stall=0) for vector in (x, y)]
    comm.Barrier()
    with pytest.raises((ClosedError, DisagreementError, RankFailedError)) as raised:
        if comm.rank == 1:
            b(y)
        if comm.rank > 0:
            a.synchronize(x)
        else:
            time.sleep(0.02)
        b.join(y)
        a.join(x)
    assert any("join both at once" in text for text in comm.allgather(str(raised.value)))
    a.close()
    b.close()


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
def test_who_waits_for_a_slow_rank_is_in_no_circle_with_those_that_have_joined(comm):
    """Rank 1 has joined both; rank 0, with more calls, waits for rank 2, for longer than a second.

    And with groups that wait: ranks 0 and 1 join the second alone, rank 3 waits for rank 2.
    """
    x, y = np.zeros(LENGTH), np.zeros(LENGTH)
    with made(comm, GroupAllreduce, x) as a, made(comm, GroupAllreduce, y) as b:
        for t in range(5 + 5 * (comm.rank != 1)):
            if (comm.rank, t) == (2, 9):
                time.sleep(1.7)
            a(x)
            b(y)
        collectives.join((a, x), (b, y))
    settings = {"group_size": 2, "wait": "group", "groups": "fixed", "sync_period": NEVER}
    with GroupAllreduce(comm, x, **settings) as a, GroupAllreduce(comm, y, **settings) as b:
        for t in range(3):
            if (comm.rank, t) == (2, 2):
                time.sleep(1.7)
            a(x)
        b.join(y)
        a.join(x)


# No weight


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_who_joins_has_the_finite_vectors_mean_where_no_other_has_weight(comm, late):
    """The rank with the most calls, whose vector alone would count, has one that is not finite."""
    last = comm.size - 1
    mine = np.full(3, float(comm.rank))
    with GroupAllreduce(comm, mine, group_size=2, sync_period=1, late=late) as average:
        for t in range(3 * (comm.rank == last)):
            if t == 2:
                mine[0] = np.nan
            average(mine)
        average.join(mine)
        assert_equal_everywhere(comm, mine)
        assert np.isfinite(mine).all()
        if late == "paper":  # the others have this rank's last average, which counts no more else
            np.testing.assert_array_equal(mine, last)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("wait", ["nobody", "group"])
@pytest.mark.parametrize("late", RULES)
def test_vectors_without_any_weight_count_alike_in_an_average_over_all_ranks(comm, late, wait):
    """All of weight 0, and one that is not finite; nobody keeps another vector than the others."""
    finite = [rank for rank in range(comm.size) if rank != 1]
    settings = {"group_size": comm.size, "sync_period": 3, "late": late, "wait": wait}
    mine = np.full((5, 40_000), np.arange(5).reshape(5, 1) + comm.rank * 10.0)
    with GroupAllreduce(comm, mine[0], **settings) as average:
        for t in range(2):
            average(mine[t], weight=0)
        changed = mine[2].copy()
        if comm.rank == 1:
            changed[7] = np.nan
        if late == "paper":
            expected = np.mean([10.0 * rank + 2 for rank in finite])
            averaged = changed.copy()
            average.average(averaged)
            np.testing.assert_allclose(averaged, expected)
            assert_equal_everywhere(comm, averaged)
        result = average(changed, weight=0)
        assert (result.synchronized, result.weight) == (True, 0)
        assert_equal_everywhere(comm, changed)
        assert np.isfinite(changed).all()
        if late == "paper":
            np.testing.assert_allclose(changed, expected)
        changed += comm.rank
        average.synchronize(changed)
        assert_equal_everywhere(comm, changed)
        average(changed)


@pytest.mark.ranks(3, 4)
def test_where_no_vector_is_finite_each_rank_keeps_its_own(comm):
    mine = np.full(3, np.nan)
    mine[0] = comm.rank
    with GroupAllreduce(comm, np.zeros(3), sync_period=1, late="paper") as average:
        assert average(mine).weight == 0
        assert mine[0] == comm.rank


# load()


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_loading_goes_on_from_another_version(comm, late, wait):
    """A larger one and smaller ones; groups and synchronizations follow the number."""
    group_size, period = min(2, comm.size), 5
    mine = [np.zeros(3), np.zeros(2, np.float32)]
    with GroupAllreduce(
        comm, mine, group_size=group_size, sync_period=period, wait=wait, late=late
    ) as average:
        for _ in range(3):
            average(mine)
        for version in (17, 4, 0, 10**12 + 3):
            loaded = [np.full(3, float(comm.rank)), np.full(2, 8.0, np.float32)]
            average.load(loaded, version)
            np.testing.assert_array_equal(loaded[0], comm.rank)
            assert (average.version, average.executed) == (version, version)
            comm.Barrier()
            for t in range(version, version + 7):
                result = average(loaded)
                assert result.version == t
                assert result.synchronized == ((t + 1) % period == 0)
                if result.synchronized:
                    assert_equal_everywhere(comm, loaded)
                    assert result.group == tuple(range(comm.size))
                else:
                    assert result.group == group_of(comm.rank, comm.size, group_size, result.source)
                    assert t <= result.source < t + period
                if wait == "group":
                    assert result.source == t
                np.testing.assert_array_equal(loaded[1], 8)
            assert 0 <= loaded[0][0] <= comm.size - 1
            average.synchronize(loaded)
            if late == "conserving" or wait == "group":
                np.testing.assert_allclose(loaded[0], (comm.size - 1) / 2)
        assert len(average.statistics().staleness) <= period


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", RULES)
def test_what_was_loaded_is_contributed(comm, late):
    """Not what was there before, by ranks that make no call."""
    with GroupAllreduce(
        comm, np.full(3, np.nan), group_size=comm.size, sync_period=NEVER, late=late
    ) as average:
        mine = np.full(3, float(comm.rank))
        average.load(mine, 5)
        if comm.rank == 0:
            result = average(mine)
            assert (result.version, result.weight) == (5, comm.size)
            np.testing.assert_allclose(mine, (comm.size - 1) / 2)
        wait_until(lambda: average.executed == 6)


@pytest.mark.ranks(3, 4)
def test_loading_different_versions_names_versions_and_ranks(comm):
    average = GroupAllreduce(comm, np.zeros(3), group_size=2)
    with pytest.raises(DisagreementError) as caught:
        average.load(np.zeros(3), 6 if comm.rank == 1 else 4)
    majority = "ranks 0, 2" if comm.size == 3 else "ranks 0, 2-3"
    mine, theirs, others = (6, 4, majority) if comm.rank == 1 else (4, 6, "rank 1")
    assert f"rank {comm.rank} waits in load() of version {mine} after 0" in str(caught.value)
    assert f"but {others} entered load() of version {theirs} after 0 calls" in str(caught.value)
    average.close()


@pytest.mark.ranks(3, 4)
def test_an_interrupted_load_goes_on_from_the_version_that_all_agree_on(comm):
    """Rank 0 is interrupted in it, and again in one of another version; the others load."""
    mine = np.full(3, float(comm.rank))
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
        if comm.rank == 0:
            for version in (10, 20):
                with interrupted():
                    average.load(mine, version)
            request = comm.Ibarrier()
        else:
            request = comm.Ibarrier()
            request.Wait()
            average.load(mine, 10)
        request.Wait()
        assert (average(mine).version, average.version) == (10, 11)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("kind", "message", "version"),
    [
        (TypeError, "version is 1.5, not an integer", 1.5),
        (ValueError, "version is -1, not between 0", -1),
    ],
)
def test_a_wrong_version_raises(comm, kind, message, version):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER) as average:
        if comm.rank == 0:
            with pytest.raises(kind, match=message):
                average.load(mine, version)
        else:
            with pytest.raises(RankFailedError, match=f"rank 0 failed.* {message}"):
                average.load(mine, 1)
