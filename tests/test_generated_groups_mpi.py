"""The averages of groups that a generator or a schedule makes, over MPI."""

from __future__ import annotations

import functools
import logging
import time

import numpy as np
import pytest
from formed_groups import replay
from generated_groups import with_generator, with_schedule
from together import interrupted, same_everywhere, wait_until

from collectives import ClosedError, GeneratedGroupAllreduce, GroupAllreduce, RankFailedError
from collectives.formed_groups import FormedGroupCollective
from collectives.protocols.scripted import ScriptedGroupProtocol
from collectives.topology import static_groups

pytestmark = pytest.mark.mpi

SHORT, LONG = 3, 70_000  # the latter in slices
KINDS = {
    "random": {"groups": "random"},
    "buffered": {"groups": "buffered"},
    "smart": {"groups": "smart"},
    "nodes": {"groups": "smart", "ranks_per_node": 2, "group_size": 2},
    "static": {"groups": "static"},
    "pairs": {"groups": "static", "ranks_per_node": 2},
}
# Which groups there are does not depend on how their vectors travel: a generator and a schedule
# with each transport.
TRANSPORTS = dict(zip(KINDS, ("messages", "shared", "shared", "messages", "shared", "messages")))
# All of them, and without a progress thread one with a generator and one without.
WITHOUT_THREAD = [("smart", "none", "messages"), ("static", "none", "shared")]
KINDS_AND_ENGINES = [*((name, "adaptive", TRANSPORTS[name]) for name in KINDS), *WITHOUT_THREAD]


def each_kind(test):
    chosen = [(KINDS[name], transport) for name, transport in TRANSPORTS.items()]
    names = ("kind", "transport")
    played = pytest.mark.parametrize(names, chosen, ids=KINDS, indirect=["transport"])
    return pytest.mark.transports()(played(test))


def each_kind_and_engine(test):
    played = pytest.mark.parametrize(
        ("kind", "engine", "transport"),
        [(KINDS[name], *others) for name, *others in KINDS_AND_ENGINES],
        ids=["-".join(names) for names in KINDS_AND_ENGINES],
        indirect=["transport"],
    )
    return pytest.mark.transports()(played(test))


def change(length, rank, call):
    """What a rank's application changes before a call; before the first, what it begins with."""
    return np.random.default_rng([rank, call + 1]).standard_normal(length)


def loiter(rank, call):
    """Let ranks come in any order."""
    time.sleep(0.003 * np.random.default_rng((rank, call)).random())


def total_of(comm, length, calls):
    """Return what all ranks have been given, each in so many calls of its own."""
    counts = comm.allgather(calls)
    return sum(
        change(length, rank, call) for rank, count in enumerate(counts) for call in range(-1, count)
    )


def train(comm, collective, mine, calls, first=0):
    """Make calls, and return how many of these were in no group."""
    alone = 0
    for call in range(first, first + calls):
        loiter(comm.rank, call)
        mine += change(mine.size, comm.rank, call)
        result = collective(mine)
        assert result.version == call
        assert comm.rank in result.group and result.timely
        assert 1 <= result.weight <= len(result.group)
        alone += len(result.group) == 1
    return alone


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize(
    ("kind", "length"),
    # How a long vector travels does not depend on who has drawn the group.
    [*((name, SHORT) for name in KINDS), ("random", LONG), ("static", LONG)],
)
def test_groups_keep_the_sum_of_all_vectors_and_bring_them_together(comm, kind, length):
    mine = change(length, comm.rank, -1)
    with GeneratedGroupAllreduce(comm, mine, **KINDS[kind]) as collective:
        alone = train(comm, collective, mine, 12)
        # Others may wait for this rank's next call, unless it pauses.
        mean = mine.copy()
        collective.average(mean)
        assert (collective.version, collective.alone) == (12, alone)
        total = total_of(comm, length, 12)
        np.testing.assert_allclose(comm.size * mean, total, rtol=1e-10, atol=1e-10)
        before = comm.allreduce(np.abs(mine - mean).max())
        for _ in range(20):
            collective(mine)
    np.testing.assert_allclose(comm.allreduce(mine), total, rtol=1e-10, atol=1e-10)
    # How much nearer depends on who is slow, and when ranks leave; further apart they never come.
    after = comm.allreduce(np.abs(mine - mean).max())
    assert after <= before + 1e-9


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("kind", ["random", "buffered", "smart", "nodes", "static"])
def test_ranks_have_the_means_of_their_groups_one_after_the_other(comm, kind):
    """The same protocol in Python says which groups there were."""
    if kind == "static":
        make = with_schedule(local_size=2)
    else:
        nodes = {"random": None, "buffered": None, "smart": [0] * comm.size}.get(
            kind, [rank // 2 for rank in range(comm.size)]
        )
        make = with_generator(
            group_size=2, nodes=nodes, controller=1, seed=comm.size, buffered=kind == "buffered"
        )
    changed = functools.partial(change, LONG)
    mine = changed(comm.rank, -1)
    with FormedGroupCollective(
        comm, mine, lambda: ({}, lambda *rank: ScriptedGroupProtocol(*rank, make))
    ) as collective:
        train(comm, collective, mine, 6 + 3 * (comm.rank % 2))
    script = collective.native.queue.protocol.script
    formed = sorted(group for groups in comm.allgather(script.formed) for group in groups)
    everyones = comm.allgather(mine)
    start = [changed(rank, -1) for rank in range(comm.size)]
    expected = replay(formed, comm.allgather(script.log), start, changed)
    np.testing.assert_allclose(everyones, expected, rtol=1e-12, atol=1e-12)
    assert script.told == [number for number, members, _ in formed if comm.rank in members]


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
@pytest.mark.parametrize("local_size", [2, 4])
def test_scheduled_groups_have_exactly_their_means(comm, local_size, engine):
    calls = 13
    mine = [change(LONG, comm.rank, -1), np.full(5, comm.rank, np.float32)]
    vectors = [change(LONG, rank, -1) for rank in range(comm.size)]
    settings = {"groups": "static", "ranks_per_node": local_size, "engine": engine}
    with GeneratedGroupAllreduce(comm, mine, **settings) as collective:
        for call in range(calls):
            loiter(comm.rank, call)
            mine[0] += change(LONG, comm.rank, call)
            result = collective(mine)
            vectors = [vector + change(LONG, rank, call) for rank, vector in enumerate(vectors)]
            own = (comm.rank,)
            for group in static_groups(comm.size, local_size, call):
                mean = sum(vectors[rank] for rank in group) / len(group)
                for rank in group:
                    vectors[rank] = mean
                if comm.rank in group:
                    own = group
            assert result.group == own and result.weight == len(own)
            np.testing.assert_allclose(mine[0], vectors[comm.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3, 4)
@each_kind_and_engine
def test_ranks_with_fewer_calls_leave_and_nobody_waits_for_them(comm, kind, engine):
    calls = 3 + 4 * comm.rank
    mine = change(LONG, comm.rank, -1)
    with GeneratedGroupAllreduce(comm, mine, **kind, engine=engine) as collective:
        train(comm, collective, mine, calls)
    np.testing.assert_allclose(
        comm.allreduce(mine), total_of(comm, LONG, calls), rtol=1e-10, atol=1e-10
    )
    assert collective.version == calls


@pytest.mark.ranks(4)
@each_kind_and_engine
def test_all_ranks_average_between_different_numbers_of_calls(comm, kind, engine):
    """A rank whose group waits for one that has come to an average of all goes on without it."""
    mine = change(LONG, comm.rank, -1)
    calls = 0
    with GeneratedGroupAllreduce(comm, mine, **kind, engine=engine) as collective:
        for number in range(6):
            count = (3 * comm.rank + number) % 5
            train(comm, collective, mine, count, first=calls)
            calls += count
            if number % 2:
                collective.synchronize(mine)
                assert same_everywhere(comm, mine.tobytes())
            else:
                mean = mine.copy()
                collective.average(mean)
                total = total_of(comm, LONG, calls)
                np.testing.assert_allclose(comm.size * mean, total, rtol=1e-9, atol=1e-9)
    total = total_of(comm, LONG, calls)
    np.testing.assert_allclose(comm.allreduce(mine), total, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("kind", ["random", "smart"])
def test_after_an_average_of_all_ranks_nobody_is_alone(comm, kind):
    mine = np.full(SHORT, float(comm.rank))
    settings = {"groups": kind, "group_size": comm.size, "controller_rank": comm.size - 1}
    with GeneratedGroupAllreduce(comm, mine, **settings) as collective:
        for _ in range(20):
            group = collective(mine).group
            # A random one is without ranks that other groups have let go on to the average.
            assert len(group) == comm.size or kind == "random"
            collective.synchronize(mine)
        # Whoever asks first after an average is in a group of all.
        assert collective.met.min() > (20 - 0.5) / comm.size
        assert collective.alone == 0 or kind == "random"


@pytest.mark.ranks(4)
def test_a_smart_generator_leaves_out_a_rank_that_computes_for_long(comm):
    """Only those wait for it that were put into a group with it before."""
    mine = np.zeros(SHORT)
    settings = {"groups": "smart", "group_size": 2, "threshold": 2}
    with GeneratedGroupAllreduce(comm, mine, **settings) as collective:
        for _ in range(40):
            if comm.rank == 2 and collective.version == 4:
                # One has made all its calls.
                comm.recv()
            collective(mine)
        if comm.rank != 2:
            comm.isend(None, dest=2).Wait()
    if comm.rank == 2:
        for _ in range(2):
            comm.recv()


@pytest.mark.ranks(1, 3, 4, 8)
@each_kind
def test_ranks_that_join_are_in_no_group_and_then_go_on_with_all(comm, kind):
    mine = change(SHORT, comm.rank, -1)
    given = mine.copy()
    with GeneratedGroupAllreduce(comm, mine, **kind) as collective:
        for block in range(2):
            before = collective.version
            calls = 2 + 3 * ((comm.rank + block) % comm.size)
            for call in range(calls):
                loiter(comm.rank, call)
                changed = change(SHORT, comm.rank, 100 * block + call)
                given += changed
                mine += changed
                assert collective(mine).version == before + call
            collective.join(mine)
            assert collective.version == before + 2 + 3 * (comm.size - 1)
            expected = np.mean(comm.allgather(given), axis=0)
            np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-10)
            assert same_everywhere(comm, mine.tobytes())


@pytest.mark.ranks(4)
@each_kind
def test_all_go_on_from_what_they_load(comm, kind):
    """Also in groups of a schedule whose iterations have been before."""
    mine = np.zeros(SHORT)
    with GeneratedGroupAllreduce(comm, mine, **kind) as collective:
        for version in (16, 4, 1):
            train(comm, collective, mine, 3 + comm.rank, first=collective.version)
            mine[:] = comm.rank
            collective.load(mine, version)
            assert collective.version == version
            alone = collective.alone
            for _ in range(2):
                collective(mine)
            assert collective.alone - alone <= 1 or kind["groups"] in ("random", "buffered")
            collective.synchronize(mine)
            np.testing.assert_allclose(mine, (comm.size - 1) / 2, rtol=1e-12)


# Exceptions, failures and the end


@pytest.mark.ranks(4)
@each_kind
def test_a_call_that_a_signal_interrupts_comes_to_its_end(comm, kind):
    """Its rank may leave before that."""
    mine = np.full(LONG, float(comm.rank))
    with GeneratedGroupAllreduce(comm, mine, **kind) as collective:
        if comm.rank == 1:
            with interrupted():
                while True:
                    collective(mine)
            comm.send("interrupted", dest=0)
            comm.send("interrupted", dest=2)
        elif comm.rank in (0, 2):
            wait_until(lambda: comm.iprobe(source=1))
            comm.recv(source=1)
            for _ in range(5):
                collective(mine)
    assert np.isfinite(mine).all()
    assert 0 <= mine.min() <= mine.max() < comm.size


@pytest.mark.ranks(4)
@each_kind
@pytest.mark.parametrize("ends_by", ["failing", "a bad vector"])
def test_a_rank_that_fails_ends_all_and_nobody_hangs(comm, kind, ends_by):
    mine = np.zeros(LONG)
    odd = comm.rank == 1
    try:
        with GeneratedGroupAllreduce(comm, mine, **kind) as collective:
            # Others may make any number of calls before this rank makes its third one.
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if odd and collective.version == 3:
                    if ends_by == "failing":
                        raise KeyError("mine")
                    collective(mine[:5])
                collective(mine)
    except (ClosedError, RankFailedError):
        assert not odd
    except (KeyError, ValueError):
        assert odd
    else:
        raise AssertionError("nobody has heard of it")
    assert collective.closed


@pytest.mark.ranks(4)
def test_who_waits_in_the_schedule_says_for_whom(comm, caplog):
    mine = np.zeros(SHORT)
    with (
        GeneratedGroupAllreduce(comm, mine, groups="static", stall=0.2) as collective,
        caplog.at_level(logging.WARNING),
    ):
        if comm.rank == 2:
            with interrupted(once=lambda: caplog.records):
                collective(mine)
            assert "in call 0 for rank 3: still computing (0 calls completed)" in caplog.text
            comm.send("said", dest=3)
        elif comm.rank == 3:
            wait_until(lambda: comm.iprobe(source=2))
            comm.recv(source=2)
            collective(mine)


@pytest.mark.ranks(4)
def test_several_schedules_and_a_group_allreduce_work_side_by_side(comm):
    vectors = [np.full(LONG, float(comm.rank)) for _ in range(3)]
    collectives = [
        GeneratedGroupAllreduce(comm, vectors[0], groups="static"),
        GeneratedGroupAllreduce(comm, vectors[1], groups="static", ranks_per_node=2),
        GroupAllreduce(comm, vectors[2], group_size=2, sync_period=4),
    ]
    for call in range(8):
        for collective, vector in zip(collectives, vectors):
            loiter(comm.rank, call)
            collective(vector)
    for collective in collectives:
        collective.close()
    for vector in vectors[:2]:
        np.testing.assert_allclose(comm.allreduce(vector), 6, rtol=1e-12)


@pytest.mark.ranks(3)
def test_a_second_generator_in_one_process_is_refused_on_every_rank(comm):
    """Ranks that wait in one for the next call of ranks that wait in the other would all wait."""
    vector = np.full(SHORT, float(comm.rank))
    with GeneratedGroupAllreduce(comm, vector, groups="random") as first:
        for groups in ("smart", "buffered"):
            with pytest.raises(
                RuntimeError, match=r"another .* is open .*close\(\) that one first"
            ):
                GeneratedGroupAllreduce(comm, vector, groups=groups)
        with GeneratedGroupAllreduce(comm, vector, groups="static") as static:
            static(vector)
        first(vector)
    with GeneratedGroupAllreduce(comm, vector, groups="smart") as second:
        second(vector)
    np.testing.assert_allclose(comm.allreduce(vector), comm.size * (comm.size - 1) / 2)


@pytest.mark.ranks(4)
def test_schedules_called_in_different_orders_say_for_whom_they_wait(comm, caplog):
    """As allreduces would, they wait: static groups are no exception to MPI's order."""
    vector = np.zeros(SHORT)
    order = slice(None, None, -1 if comm.rank % 2 else 1)
    options = {"groups": "static", "ranks_per_node": 2, "stall": 0.2}
    first = GeneratedGroupAllreduce(comm, vector, **options)
    second = GeneratedGroupAllreduce(comm, vector, **options)
    with caplog.at_level(logging.WARNING), interrupted(once=lambda: caplog.records):
        for collective in (first, second)[order] * 4:
            collective(vector)
    assert "has waited" in caplog.text and f"for rank {comm.rank ^ 1}" in caplog.text
    # Whoever leaves is not waited for.
    for collective in (first, second):
        collective.close()


BAD = {
    "no such groups": ({"groups": "clever"}, ValueError, "groups is 'clever', not one of random"),
    "alone": ({"group_size": 1}, ValueError, "group_size is 1, less than 2"),
    "half": ({"group_size": 2.5}, TypeError, "group_size is 2.5, not an integer"),
    "never": ({"threshold": 0}, ValueError, "threshold is 0, less than 1"),
    "far": ({"threshold": 2**70}, ValueError, f"threshold is {2**70}, more than {2**60}"),
    "seldom": ({"sync_every": 2**70}, ValueError, f"sync_every is {2**70}, more than {2**60}"),
    "many": ({"group_size": 2**31}, ValueError, f"group_size is {2**31}, more than {2**30}"),
    "nodes": ({"ranks_per_node": 0}, ValueError, "ranks_per_node is 0, less than 1"),
    "a name": ({"ranks_per_node": "all"}, TypeError, "ranks_per_node is 'all', not an integer"),
    "seed": ({"seed": -1}, ValueError, "seed is -1, less than 0"),
    "elsewhere": ({"controller_rank": 99}, ValueError, "controller_rank is 99, not between 0 and"),
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("given", "error", "text"), BAD.values(), ids=BAD)
def test_what_is_wrong_raises_on_every_rank(comm, given, error, text):
    given = given if comm.rank == comm.size - 1 else {}
    with pytest.raises(error, match=text):
        GeneratedGroupAllreduce(comm, np.zeros(3), **given)


@pytest.mark.ranks(3)
def test_what_differs_raises_on_every_rank(comm):
    odd = comm.rank == 2
    with pytest.raises(ValueError, match="kind of groups differs between ranks: smart on ranks 0"):
        GeneratedGroupAllreduce(comm, np.zeros(3), groups="random" if odd else "smart")
    with pytest.raises(ValueError, match="ranks_per_node differs between ranks: None on ranks 0"):
        GeneratedGroupAllreduce(comm, np.zeros(3), ranks_per_node=2 if odd else None)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "length"), [("random", LONG), ("buffered", SHORT), ("smart", SHORT), ("nodes", SHORT)]
)
def test_a_call_ends_without_ranks_that_wait_for_it_elsewhere(comm, kind, length):
    """A rank's group waits for a next call of others, which wait for it in a barrier."""
    mine = np.full(length, float(comm.rank))
    with GeneratedGroupAllreduce(comm, mine, stall=0.2, **KINDS[kind]) as allreduce:
        if comm.rank == 1:
            assert allreduce(mine).weight == 1
            np.testing.assert_array_equal(mine, 1)
        comm.Barrier()
        allreduce(mine)
        comm.Barrier()
        allreduce.average(mine)
        np.testing.assert_allclose(mine, 1.5, rtol=1e-14)


@pytest.mark.ranks(1, 4)
def test_groups_larger_than_the_job_are_of_all(comm):
    mine = np.full(SHORT, float(comm.rank))
    for groups in ("random", "buffered", "smart"):
        with GeneratedGroupAllreduce(comm, mine, groups=groups, group_size=99) as collective:
            assert collective(mine).group == tuple(range(comm.size))
            assert collective.ranks_per_node == comm.size
            said = f"GeneratedGroupAllreduce({comm.size} rank"
            assert repr(collective).startswith(said) and "group_size=99" in repr(collective)


@pytest.mark.ranks(4)
def test_a_schedule_needs_nodes_with_equally_many_ranks(comm, monkeypatch):
    module = "collectives.generated_groups.nodes_of"
    monkeypatch.setattr(module, lambda comm: [0, 1, 1, 1])
    with pytest.raises(
        ValueError, match=r"different numbers .*: rank 0; ranks 1-3; give ranks_per_"
    ):
        GeneratedGroupAllreduce(comm, np.zeros(3), groups="static")
    mine = np.full(SHORT, float(comm.rank))
    with GeneratedGroupAllreduce(comm, mine, groups="smart") as collective:
        assert collective.ranks_per_node is None
        assert collective(mine).group in ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (1, 3))
        assert collective(mine).group == ((0,) if comm.rank == 0 else (1, 2, 3)) or comm.rank == 0
