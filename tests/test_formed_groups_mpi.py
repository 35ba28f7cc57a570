"""Groups that a protocol forms, over MPI."""

from __future__ import annotations

import functools
import logging
import time

import numpy as np
import pytest
from formed_groups import LATE, PlannedGroups, RandomGroups, replay, source
from together import compute_until, interrupted, same_everywhere, wait_until

from collectives import (
    ClosedError,
    DisagreementError,
    GeneratedGroupAllreduce,
    GroupAllreduce,
    RankFailedError,
    ReadyGroupAllreduce,
    topology,
)
from collectives.formed_groups import FormedGroupCollective
from collectives.protocols.scripted import ScriptedGroupProtocol

pytestmark = pytest.mark.mpi

SHORT, LONG = 3, 70_000  # the latter in slices


def form(comm, like, protocol, engine=None, stall=None, **settings):
    """Return a collective of one of the protocols in Python."""
    make = functools.partial(protocol, **settings)
    return FormedGroupCollective(
        comm,
        like,
        lambda: ({}, lambda port, rank, size: ScriptedGroupProtocol(port, rank, size, make)),
        engine=engine,
        stall=stall,
    )


def script_of(collective):
    return collective.native.queue.protocol.script


def change(length, rank, call):
    """What a rank's application changes before a call; before the first, what it begins with."""
    return np.random.default_rng([rank, call + 1]).standard_normal(length)


def loiter(rank, call):
    """Let ranks come in any order."""
    time.sleep(0.004 * np.random.default_rng((rank, call)).random())


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("late", ["out", "waited for"])
def test_groups_that_one_rank_forms_have_the_means_of_their_records(comm, late, length):
    changed = functools.partial(change, length)
    mine = changed(comm.rank, -1)
    with form(comm, mine, RandomGroups, seed=comm.size, late=late) as collective:
        for call in range(12):
            loiter(comm.rank, call)
            mine += changed(comm.rank, call)
            result = collective(mine)
            assert result.version == call
            assert comm.rank in result.group
        assert collective.version == 12
        total = mine.copy()
        collective.average(total)
    script = script_of(collective)
    everyones = np.array(comm.allgather(mine))
    formed, logs = comm.bcast(script.formed), comm.allgather(script.log)
    start = [changed(rank, -1) for rank in range(comm.size)]
    expected = replay(formed, logs, start, changed)
    np.testing.assert_allclose(everyones, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(total, everyones.mean(axis=0), rtol=1e-12, atol=1e-12)
    own = [number for number, members, _ in formed if comm.rank in members]
    assert script.told == own
    assert collective.statistics().versions == len(own)
    several = [members for _, members, _ in formed if len(members) > 1]
    met = topology.averaging_matrix_of(comm.allgather(collective.met))
    if several:
        np.testing.assert_allclose(met, topology.averaging_matrix(several, comm.size), atol=1e-12)
    else:
        assert met is None


@pytest.mark.ranks(3, 4)
def test_vectors_of_groups_on_one_node_travel_as_the_transport_says(comm, transport):
    mine = np.full(LONG, float(comm.rank))
    with form(comm, mine, PlannedGroups, plan=4 * [[(0, (0, 1, 2))]]) as collective:
        assert collective.transport == transport
        collective(mine)
        assert (collective.native.group_bytes > 0) == (transport == "messages" and comm.rank < 3)
    np.testing.assert_array_equal(mine, 1 if comm.rank < 3 else 3)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("kind", [ReadyGroupAllreduce, GeneratedGroupAllreduce])
def test_a_rank_averages_in_every_so_manieth_call(comm, kind):
    mine = np.zeros(SHORT)
    with kind(comm, mine, group_size=max(comm.size, 2), sync_every=3) as collective:
        for call in range(9):
            mine += comm.rank
            expected = tuple(range(comm.size)) if call % 3 == 2 else (comm.rank,)
            assert collective(mine).group == expected
    np.testing.assert_allclose(mine, 9 * (comm.size - 1) / 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [ReadyGroupAllreduce, GeneratedGroupAllreduce])
def test_a_period_that_is_none_raises_on_every_rank(comm, kind):
    with pytest.raises(ValueError, match="sync_every is 0, less than 1"):
        kind(comm, np.zeros(SHORT), sync_every=0 if comm.rank == 1 else 1)
    with pytest.raises(ValueError, match="sync_every differs between ranks"):
        kind(comm, np.zeros(SHORT), sync_every=2 if comm.rank == 1 else 1)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_who_computes_averages_its_model_meanwhile_where_ranks_are_passive(comm, length):
    """With equal weights, the sum of what all ranks have changes by their changes alone."""
    mine = change(length, comm.rank, -1)
    odd = comm.rank == comm.size - 1
    calls = 7 if odd else 32
    settings = {"late": "passive", "equal": True, "most_awaited": 1}
    with form(comm, mine, RandomGroups, **settings) as collective:
        for call in range(calls):
            mine += change(length, comm.rank, call)
            collective(mine)
            if call == calls - 6:
                compute_until(comm, everybody_else_is_done=not odd)
                assert collective.statistics().passive > 3 or not odd
            loiter(comm.rank, call)
        collective.synchronize(mine)
        counts = comm.allgather(calls)
        given = sum(
            change(length, rank, call)
            for rank, count in enumerate(counts)
            for call in range(-1, count)
        )
        np.testing.assert_allclose(mine, given / comm.size, rtol=1e-10, atol=1e-10)
        collective(mine)
        np.testing.assert_allclose(mine, given / comm.size, rtol=1e-10, atol=1e-10)


class AveragesWithZero(source.GroupProtocol):
    """Calls of rank 1 average with rank 0; others average nothing."""

    def __init__(self, *rank):
        super().__init__(*rank)
        self.passive = True

    def call(self):
        super().call()
        if self.rank == 1:
            self.port.send(0, [self.calls])
            self.port.reduce(source.Group(self.calls, (0, 1)))
        self.port.return_model()

    def arrived(self, _, integers):
        self.port.reduce(source.Group(integers[0], (0, 1)))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_passive_rank_whose_call_returned_nan_contributes_nothing(comm, transport, length):
    mine = np.full(length, float(comm.rank))
    with form(comm, np.zeros(length), AveragesWithZero) as collective:
        if comm.rank == 0:
            mine[-1] = np.nan
            collective(mine)
        comm.barrier()
        if comm.rank == 1:
            for _ in range(2):
                collective(mine)
                np.testing.assert_array_equal(mine, 1)
        comm.barrier()
        assert collective.statistics().left_out == (2 if comm.rank == 0 else 0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_the_slow_member_of_a_group_delays_no_other_group(comm, length):
    calls = 30
    plan = [[(2 * call, (0, 1)), (2 * call + 1, (2, 3), (1, 3))] for call in range(calls)]
    mine = np.full(length, float(comm.rank))
    with form(comm, mine, PlannedGroups, plan=plan) as collective:
        if comm.rank == 3:
            # Rank 2 waits in its first group all that time.
            comm.recv(source=0)
            comm.recv(source=1)
        for _ in range(calls):
            collective(mine)
        if comm.rank < 2:
            comm.send("all calls made", dest=3)
    np.testing.assert_array_equal(mine, 0.5 if comm.rank < 2 else (2 + 3 * 3) / 4)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_later_groups_messages_wait_for_the_group_before(comm, length):
    """Rank 0 begins its group while rank 1 is still in another one, whose other member is late."""
    plan = [[(5, (1, 3)), (6, (0, 1)), (7, (1, 2)), (70, (0, 1, 2, 3), (0, 1, 2, 1))]]
    mine = np.full(length, 2.0**comm.rank)
    with form(comm, mine, PlannedGroups, plan=plan) as collective:
        if comm.rank == 3:
            time.sleep(0.1)
        result = collective(mine)
        assert (result.group, result.weight) == ((0, 1, 2, 3), 4)
    # 5: ranks 1 and 3 have 5; 6: ranks 0 and 1 have 3; 7: ranks 1 and 2 have 3.5
    np.testing.assert_allclose(mine, (3.5 + 2 * 3.5 + 5) / 4, rtol=1e-14)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_vector_that_is_not_finite_does_not_count_and_weight_0_gets_the_mean(comm, length):
    plan = [[(0, range(4), (1, 2, 3, 0))], [(1, (0, 1), (1, 0)), (2, (2, 3))], [(3, (0, 2))]]
    mine = np.full(length, float(comm.rank))
    with form(comm, mine, PlannedGroups, plan=plan) as collective:
        if comm.rank == 1:
            mine[-1] = np.inf
        result = collective(mine)
        np.testing.assert_allclose(mine, (0 + 3 * 2) / 4, rtol=1e-14)
        assert result.weight == 4
        assert result.timely == (comm.rank != 1)
        # Where nobody counts, each has what it had.
        mine[:] = np.nan if comm.rank == 0 else comm.rank
        collective(mine)
        np.testing.assert_array_equal(mine, (np.nan, 1, 2.5, 2.5)[comm.rank])
        if comm.rank in (0, 2):
            mine[:] = comm.rank
        result = collective(mine)
        np.testing.assert_array_equal(mine, (1, 1, 1, 2.5)[comm.rank])
        assert result.group == ((0, 2) if comm.rank in (0, 2) else (comm.rank,))
        assert collective.statistics().left_out == (comm.rank < 2)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_arrays_of_several_types_and_averages_of_all(comm, engine):
    types, lengths = [np.float16, np.float32, np.float64], [5, 70_001, 1000]
    mine = [np.full(n, comm.rank, dtype) for n, dtype in zip(lengths, types)]
    with form(comm, mine, RandomGroups, engine=engine, equal=True) as collective:
        for call in range(6):
            loiter(comm.rank, call)
            collective(mine)
            for array in mine[1:]:
                np.testing.assert_allclose(array, mine[2][0], rtol=1e-5)
        before = mine[2].copy()
        collective.average([array.copy() for array in mine])
        np.testing.assert_array_equal(mine[2], before)
        collective.synchronize(mine)
        np.testing.assert_allclose(mine[2], (comm.size - 1) / 2, rtol=1e-12)
        assert same_everywhere(comm, mine[1].tobytes())
        collective(mine)
        np.testing.assert_allclose(mine[2], (comm.size - 1) / 2, rtol=1e-12)


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_ranks_that_join_are_in_no_group_and_keep_the_sum(comm, late, engine):
    """Rank r makes fewer calls than the others, twice; with equal weights the sum stays."""
    mine = change(SHORT, comm.rank, -1)
    given = mine.copy()
    with form(comm, mine, RandomGroups, late=late, equal=True, engine=engine) as collective:
        for block in range(2):
            before = collective.version
            calls = 2 + 3 * ((comm.rank + block) % comm.size)
            for call in range(calls):
                loiter(comm.rank, call)
                changed = change(SHORT, comm.rank, 100 * block + call)
                given += changed
                mine += changed
                assert collective(mine).version == before + call
            if comm.rank % 2:
                collective.join(mine)
            else:
                with collective.joining(mine):
                    pass
            assert collective.version == before + 2 + 3 * (comm.size - 1)
            expected = np.mean(comm.allgather(given), axis=0)
            np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-10)
            assert same_everywhere(comm, mine.tobytes())


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", LATE)
def test_all_go_on_from_what_they_load(comm, late):
    mine = np.zeros(SHORT)
    with form(comm, mine, RandomGroups, late=late, equal=True) as collective:
        for call in range(4):
            mine += change(SHORT, comm.rank, call)
            collective(mine)
        mine[:] = comm.rank
        collective.load(mine, 17)
        assert collective.version == 17
        for call in range(3):
            loiter(comm.rank, call)
            assert collective(mine).version == 17 + call
        collective.synchronize(mine)
        np.testing.assert_allclose(mine, (comm.size - 1) / 2, rtol=1e-12)


@pytest.mark.ranks(4)
def test_ranks_that_load_different_versions_are_named(comm):
    with form(comm, np.zeros(SHORT), RandomGroups) as collective:
        with pytest.raises(DisagreementError, match=r"load\(\) of version [34]"):
            collective.load(np.zeros(SHORT), 4 if comm.rank == 2 else 3)
        with pytest.raises(ClosedError):
            collective(np.zeros(SHORT))


# Exceptions, failures and the end


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_call_that_a_signal_interrupts_goes_on_in_its_groups(comm, length):
    plan = [[(0, (0, 1), (3, 1)), (1, (0, 2))], [(2, range(4))]]
    mine = np.full(length, 4.0 * comm.rank + 4)
    with form(comm, mine, PlannedGroups, plan=plan) as collective:
        if comm.rank == 0:
            with interrupted():
                collective(mine)
            np.testing.assert_array_equal(mine, 4)
            mine[:] = 7
            comm.send("interrupted", dest=1)
        elif comm.rank == 1:
            # Rank 0 waits for this one.
            wait_until(lambda: comm.iprobe(source=0))
            comm.recv(source=0)
        if comm.rank:
            collective(mine)
        expected = (7, (3 * 4 + 8) / 4, (5 + 12) / 2, 16)
        np.testing.assert_allclose(mine, expected[comm.rank], rtol=1e-14)
        collective(mine)
        np.testing.assert_allclose(mine, sum(expected) / 4, rtol=1e-14)
        assert collective.version == 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_may_be_interrupted_before_its_group_is_formed(comm, goes_on):
    """It takes part in a group all the same, unless its rank leaves before."""
    mine = np.full(LONG, float(comm.rank))
    with form(comm, mine, RandomGroups, equal=True) as collective:
        script_of(collective).awaited = comm.size
        comm.Barrier()
        if comm.rank == 1:
            with interrupted():
                collective(mine)
            np.testing.assert_array_equal(mine, 1)
            mine[:] = 7
        if not goes_on:
            if comm.rank == 1:
                collective.native.begin_close()
            elif comm.rank == 0:
                wait_until(lambda: 1 not in script_of(collective).present)
        comm.Barrier()
        for call in range(3):
            if comm.rank != 1:
                collective(mine)
            elif goes_on and call:
                # The interrupted one was the first.
                collective(mine)
    formed = comm.bcast(script_of(collective).formed)
    in_first = any(1 in members for _, members, _ in formed)
    assert in_first == goes_on
    assert 0 <= mine.min() <= mine.max() <= 7


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("ends_by", ["closing", "failing", "a bad vector"])
def test_ranks_may_close_or_fail_at_any_time_and_nobody_hangs(comm, late, ends_by):
    """One that closes is in no further group; the others go on."""
    mine = np.zeros(LONG)
    odd = comm.rank == 1
    calls = 0
    try:
        with form(comm, mine, RandomGroups, late=late) as collective:
            for call in range(30):
                mine += 1
                if odd and call == 3:
                    if ends_by == "closing":
                        break
                    if ends_by == "failing":
                        raise KeyError("mine")
                    collective(mine[:5])
                collective(mine)
                calls += 1
    except (ClosedError, RankFailedError):
        assert not odd
        assert ends_by != "closing"
    except (KeyError, ValueError):
        assert odd
    assert collective.closed
    assert calls == (3 if odd else 30) or ends_by != "closing"
    with pytest.raises(ClosedError):
        collective(mine)


@pytest.mark.ranks(4)
def test_a_call_that_waits_for_long_says_for_whom(comm, caplog):
    plan = [[(0, (2, 3)), (1, (1, 2))]]
    mine = np.zeros(SHORT)
    with (
        form(comm, mine, PlannedGroups, plan=plan, stall=0.2) as collective,
        caplog.at_level(logging.WARNING),
    ):
        comm.Barrier()
        if comm.rank == 3:
            for source in (1, 2):
                wait_until(lambda source=source: comm.iprobe(source=source))
                comm.recv(source=source)
        elif comm.rank:
            if comm.rank == 1:
                comm.recv(source=2)  # until that one waits
            with interrupted(once=lambda: caplog.records):
                collective(mine)
            if comm.rank == 2:
                comm.send("waited", dest=1)
            comm.send("said", dest=3)
            why = {
                1: "in call 0, in group 1, for rank 2: in group 0",
                2: "in call 0, in group 0, for rank 3: still computing (0 calls completed)",
            }
            assert why[comm.rank] in caplog.text
        if comm.rank in (0, 3):
            collective(mine)


@pytest.mark.ranks(4)
def test_who_waits_for_its_group_to_be_formed_says_so(comm, caplog):
    mine = np.zeros(SHORT)
    with (
        form(comm, mine, RandomGroups, stall=0.2) as collective,
        caplog.at_level(logging.WARNING),
    ):
        script = script_of(collective)
        script.awaited = comm.size
        comm.Barrier()
        if comm.rank == 2:
            with interrupted(once=lambda: caplog.records):
                collective(mine)
            assert "in call 0 for ranks 0-1, 3: still computing" in caplog.text
        comm.Barrier()


@pytest.mark.ranks(4)
def test_several_of_them_and_a_group_allreduce_work_side_by_side(comm):
    vectors = [np.full(LONG, float(comm.rank)) for _ in range(3)]
    collectives = [
        form(comm, vectors[0], RandomGroups, seed=1, most_awaited=1),
        form(comm, vectors[1], RandomGroups, seed=2, most_awaited=1, late="passive"),
        GroupAllreduce(comm, vectors[2], group_size=2, sync_period=4),
    ]
    for call in range(8):
        for collective, vector in zip(collectives, vectors):
            loiter(comm.rank, call)
            collective(vector)
    for collective in collectives:
        collective.close()
    assert all(np.isfinite(vector).all() for vector in vectors)


@pytest.mark.ranks(4)
def test_what_is_wrong_with_a_plan_on_one_rank_raises_on_all(comm):
    def plan():
        if comm.rank == 2:
            raise ValueError("no such groups")
        return {}, None

    with pytest.raises(ValueError, match="rank 2.*no such groups"):
        FormedGroupCollective(comm, np.zeros(3), plan)
    with pytest.raises(ValueError, match="T differs between ranks: 0 on rank 0; 1 on rank 1"):
        FormedGroupCollective(comm, np.zeros(3), lambda: ({"T": comm.rank}, None))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("made", [False, True])
def test_whatever_a_plan_or_its_factory_raises_is_raised_on_every_rank(comm, made):
    def fail(*_):
        raise KeyError("no plan")

    def plan():
        if comm.rank == 1 and not made:
            fail()
        return {}, fail if comm.rank == 1 else lambda port, rank, size: PlannedGroups(
            port, rank, size, plan=[]
        )

    with pytest.raises(KeyError, match="rank 1: 'no plan'"):
        FormedGroupCollective(comm, np.zeros(3), plan)
