"""Queues of updates and tokens over MPI: how far ranks get, what they keep, and what they say."""

from __future__ import annotations

import contextlib
import logging
import re

import networkx
import numpy as np
import pytest
from together import assert_equal_everywhere, interrupted, same_everywhere, wait_until

from collectives import ClosedError, NeighborAverage, QueuedNeighborAverage

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]

# Elements of a vector that travels in blocks.
LONG = 800_000


def ahead_of_rank_0(comm, average, mine, iterations, received):
    """Let all ranks but 0 get so far while rank 0 computes, and until it has so many messages."""
    if comm.rank:
        while average.version < iterations:
            mine += 1
            average(mine)
        comm.send(None, dest=0)
    else:
        for source in range(1, comm.size):
            wait_until(lambda source=source: comm.iprobe(source=source))
            comm.recv(source=source)
        mailbox = average.native.mailbox
        wait_until(lambda: mailbox.progress_count == received)


@pytest.mark.parametrize(
    ("settings", "graph", "length"),
    [
        ({"max_gap": None}, "ring", 999),
        ({"mode": "notify-ack"}, "ring-based", 999),
        ({"max_gap": 2}, "ring", LONG),
        ({"mode": "notify-ack"}, "ring", LONG),
    ],
)
def test_on_a_regular_graph_it_has_the_bits_of_the_average_of_neighbors(
    comm, settings, graph, length
):
    changed = np.random.default_rng(comm.rank).normal(size=(4, length))
    vectors = []
    for make, given in ((NeighborAverage, {}), (QueuedNeighborAverage, settings)):
        mine = np.full(length, comm.rank / 7)
        with make(comm, mine, graph=graph, **given) as average:
            for change in changed:
                mine += change
                result = average(mine)
        vectors.append(mine)
        assert result.group == tuple(sorted({*result.group, comm.rank}))
        assert len(result.group) == result.weight == (3 if graph == "ring" else 4)
    assert vectors[0].tobytes() == vectors[1].tobytes()


@pytest.mark.parametrize("order", ["parallel", "serial"])
def test_both_orders_are_their_recurrences(comm, order):
    changed = np.random.default_rng(3).normal(size=(8, comm.size, 50))
    everyones = np.arange(4.0)[:, None] + np.zeros(50)
    mine = everyones[comm.rank].copy()
    graph = networkx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    matrix = networkx.to_numpy_array(graph, range(4)) + np.eye(4)
    matrix /= matrix.sum(axis=0)
    with QueuedNeighborAverage(comm, mine, graph=graph, order=order) as average:
        for change in changed:
            mine += change[comm.rank]
            average(mine)
            before, after = (change, 0) if order == "serial" else (0, change)
            everyones = matrix.T @ (everyones + before) + after
        np.testing.assert_allclose(mine, everyones[comm.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [999, LONG])
def test_a_rank_that_computes_keeps_as_many_updates_as_tokens_allow(comm, length):
    """With one backup, which makes up for rank 0 alone, three others get max_gap ahead of it."""
    max_gap, others = 3, 3
    mine = np.zeros(length)
    with QueuedNeighborAverage(comm, mine, max_gap=max_gap, backup=1) as average:
        ahead_of_rank_0(comm, average, mine, max_gap, others * (2 * max_gap + 1))
        mailbox = average.native.mailbox
        if comm.rank == 0:
            kept = others * (max_gap + 1)
            wait_until(lambda: mailbox.vectors_kept >= kept)
        comm.Barrier()
        for _ in range(max_gap + 3):
            average(mine)
        # And, while they are averaged, one of each; short ones also while they are sent, which may
        # be those of all calls so far.
        sent = 0 if length == LONG else average.version + 1
        assert mailbox.vectors_kept <= others * (max_gap + 2) + sent
        assert comm.allreduce(average.dropped + average.withheld) > 0


@pytest.mark.parametrize("mean", ["weighted", "simple"])
def test_of_stale_updates_a_rank_keeps_the_newest_of_each(comm, mean):
    staleness, others = 3, 3
    mine = np.zeros(LONG)
    given = {"max_gap": 9, "staleness": staleness, "mean": mean}
    with QueuedNeighborAverage(comm, mine, **given) as average:
        ahead = staleness + 1
        ahead_of_rank_0(comm, average, mine, ahead, others * (2 * ahead + 1))
        mailbox = average.native.mailbox
        assert mailbox.vectors_kept <= 2 * others
        if comm.rank == 0:
            assert average.dropped == others * ahead
            assert average(mine).group == (0, 1, 2, 3)
            # Of iteration 4 each, which counts twice what its own does, 0; or as much.
            theirs = [comm.recv(source=source) for source in (1, 2, 3)]
            share = 2 / 7 if mean == "weighted" else 1 / 4
            np.testing.assert_allclose(mine, share * np.sum(theirs), rtol=1e-9)
        else:
            own = np.empty(LONG)
            average.model(own)
            comm.send(own[0], dest=0)
        comm.Barrier()
        for _ in range(ahead + 3):
            average(mine)
        assert mailbox.vectors_kept <= 2 * others


@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_a_rank_that_is_behind_skips_and_all_end_in_the_same_iteration(comm, engine):
    mine = np.zeros(500)
    settings = {"max_gap": 4, "backup": 1, "max_skip": 10, "engine": engine}
    with QueuedNeighborAverage(comm, mine, **settings) as average:
        if engine == "adaptive":
            ahead_of_rank_0(comm, average, mine, 4, 3 * (2 * 4 + 1))
            if comm.rank == 0:
                result = average(mine)
                assert (average.version, average.skipped) == (4, 3)
                assert result.version == 3
                assert result.group == (0, 1, 2, 3)
        while average.version < 20:
            mine += 1
            average(mine)
        average.average(mine)
        assert_equal_everywhere(comm, mine)
        assert average.statistics().calls == average.version - average.skipped
        average.load(mine, 3)
        assert average.version == 3
        while average.version < 9:
            average(mine)
        np.testing.assert_allclose(mine, mine[0])
        average.synchronize(mine)
        assert_equal_everywhere(comm, mine)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"backup": 1, "max_skip": 5}, 999),
        ({"staleness": 2, "max_skip": 5}, 999),
        ({"mode": "notify-ack", "order": "serial"}, 999),
        ({"backup": 1, "staleness": 1}, LONG),
    ],
    ids=str,
)
def test_ranks_join_after_different_numbers_of_calls(comm, settings, length):
    mine = np.full(length, float(comm.rank))
    with QueuedNeighborAverage(comm, mine, **settings) as average:
        for _ in range(1 + 2 * comm.rank):
            average(mine)
        average.join(mine)
        assert average.version >= 1 + 2 * 3
        assert same_everywhere(comm, average.version)
        assert 0 <= mine[0] <= comm.size - 1
        assert_equal_everywhere(comm, mine)
        # Who skips an iteration makes fewer calls.
        last = average.version + 3
        while average.version < last:
            average(mine)
        np.testing.assert_allclose(mine, mine[0], rtol=1e-12)


def test_backups_do_without_a_rank_that_has_closed_for_as_long_as_they_have_its_tokens(comm):
    mine = np.zeros(LONG)
    with QueuedNeighborAverage(comm, mine, max_gap=6, backup=1) as average:
        average(mine)
        if comm.rank == 2:
            return
        # Rank 0 leaves, for one, after six calls that rank 2 does not make.
        with pytest.raises(ClosedError, match="has closed"):
            for _ in range(9):
                average(mine)
        assert average.version == 7


def test_a_call_that_waits_for_long_names_the_update_or_the_token(comm, caplog):
    for settings, first, what in (
        ({"max_gap": 2}, 1, r"in call 1 \(update 1 of .*2\) for .*\b2: still"),
        ({"max_gap": 2, "backup": 1}, 2, r"in call 2 \(.*a token of .*2\) for .*\b2: still"),
    ):
        mine = np.zeros(3)
        caplog.clear()
        with QueuedNeighborAverage(comm, mine, stall=0.2, **settings) as average:
            if comm.rank == 2:
                wait_until(lambda: comm.iprobe(source=1))
                comm.recv(source=1)
            else:
                for _ in range(first):
                    average(mine)
                for other in (0, 3):
                    if comm.rank == 1:
                        comm.recv(source=other)
                    elif comm.rank == other:
                        comm.send("called", dest=1)
                with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
                    if comm.rank == 1:
                        stack.enter_context(interrupted(once=lambda: caplog.records))
                    average(mine)
                if comm.rank == 1:
                    comm.send("said", dest=2)
                    assert re.search(what, caplog.text)
            while average.version < 4:
                average(mine)


BAD = {
    "gap": ({"max_gap": 0}, ValueError, "max_gap is 0, not between"),
    "half a gap": ({"max_gap": 0.5}, TypeError, "max_gap is 0.5, not an integer"),
    "backups": ({"backup": 4}, ValueError, "backup is 4, not between 0 and 3"),
    "no tokens": ({"backup": 1, "max_gap": None}, ValueError, "backup needs tokens"),
    "hybrid": (
        {"backup": 1, "max_gap": None, "staleness": 1},
        ValueError,
        "backup needs tokens",
    ),
    "skips": ({"max_skip": 2, "max_gap": None}, ValueError, "max_skip needs tokens"),
    "staleness": ({"staleness": -1}, ValueError, "staleness is -1"),
    "a rank's backups": (
        {"backup": [0, 4, 0, 0]},
        ValueError,
        r"backup\[1\] is 4, not between 0 a",
    ),
    "mean": ({"mean": "median"}, ValueError, "mean is 'median', not one of weighted, simple"),
    "mode": ({"mode": "ack"}, ValueError, "mode is 'ack', not one of standard, notify-ack"),
    "order": ({"order": 1}, ValueError, "order is 1, not one of parallel, serial"),
    "both": (
        {"mode": "notify-ack", "backup": 1},
        ValueError,
        "notify-ack cannot be combined with backup",
    ),
    "graph": ({"graph": "rings"}, ValueError, "not 'rings'"),
}


@pytest.mark.parametrize(("settings", "error", "text"), BAD.values(), ids=BAD)
def test_a_bad_argument_on_one_rank_raises_on_all(comm, settings, error, text):
    with pytest.raises(error, match=text) as raised:
        QueuedNeighborAverage(comm, np.zeros(3), **(settings if comm.rank == 2 else {}))
    assert same_everywhere(comm, str(raised.value))
    assert "rank 2" in str(raised.value)


def test_settings_that_differ_and_graphs_that_are_uneven_are_named(comm, caplog):
    with pytest.raises(ValueError, match="max_gap differs between ranks: 5 on ranks 0-2; 4 on ran"):
        QueuedNeighborAverage(comm, np.zeros(3), max_gap=5 - (comm.rank == 3))
    with caplog.at_level(logging.WARNING):
        QueuedNeighborAverage(comm, np.zeros(3), graph=networkx.star_graph(3)).close()
        with QueuedNeighborAverage(comm, np.zeros(3), staleness=4, max_gap=5) as average:
            assert average.max_gap == 5
        with QueuedNeighborAverage(comm, np.zeros(3), staleness=4) as average:
            assert average.max_gap == 6
    assert ("graph: ranks have unequal weights: " in caplog.text) == (comm.rank == 0)
    assert caplog.text.count("staleness 4 never makes a rank wait") == (comm.rank == 0)


def test_a_rank_omits_as_many_neighbors_as_are_its_own_backups(comm):
    """Ranks 1 and 2 go on without rank 0, which rank 3 waits for."""
    mine = np.zeros(9)
    with QueuedNeighborAverage(comm, mine, graph="ring-based", backup=[0, 1, 1, 0]) as average:
        if comm.rank in (1, 2):
            assert len(average(mine).group) >= 3
            comm.send(None, dest=0)
        elif comm.rank == 0:
            for source in (1, 2):
                comm.recv(source=source)
        if comm.rank in (0, 3):
            assert average(mine).group == (0, 1, 2, 3)
