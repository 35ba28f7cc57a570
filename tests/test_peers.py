"""The collectives whose ranks send their vectors to one another, beside the mathematics."""

from __future__ import annotations

import contextlib
import logging
import re
import time

import ml_dtypes
import networkx
import numpy as np
import pytest
from together import (
    Interrupted,
    assert_equal_everywhere,
    compute_until,
    interrupted,
    same_everywhere,
    wait_until,
)

from collectives import (
    ClosedError,
    DisagreementError,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PushSum,
    QueuedNeighborAverage,
    RankFailedError,
    graphs,
)

pytestmark = pytest.mark.mpi

ALL = {
    "neighbors": NeighborAverage,
    "queues": QueuedNeighborAverage,
    "push-sum": PushSum,
    "pairs": PairwiseAverage,
    "server": ParameterServer,
}
each = pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
# Elements of a vector that travels in many blocks, more than have memory at a time.
LONG = 800_000
each_length = pytest.mark.parametrize("length", [1000, LONG])


def changes(size, calls, length):
    """Return what every rank's application changes before each call."""
    return np.random.default_rng(3).normal(size=(calls, size, length))


@contextlib.contextmanager
def after_a_call(comm, kind):
    """Give a collective that all ranks have called once, and its vector."""
    mine = np.zeros(3)
    with kind(comm, mine) as collective:
        collective(mine)
        comm.Barrier()  # or some may hear of others' errors in that call
        yield collective, mine


def loiter(rank, call):
    """Let ranks come in any order."""
    time.sleep(0.004 * np.random.default_rng((rank, call)).random())


# Neighbors


def star(size):
    """A graph that is no ring, with Metropolis's weights."""
    return {"graph": networkx.star_graph(size - 1)}


def directed(size):
    """Two circles in one direction, with a matrix of their own."""
    steps = [1, 2] if size > 2 else [1]
    edges = [(i, (i + step) % size) for i in range(size) for step in steps]
    matrix = np.zeros((size, size))
    for a, b in edges:
        matrix[a, b] += 0.25
    matrix[np.diag_indices(size)] += 1 - matrix.sum(axis=0)
    return {"graph": networkx.DiGraph(edges), "mixing": matrix}


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("clock", ["neighbors", "global"])
@pytest.mark.parametrize(
    "plan",
    [lambda size: {}, lambda size: {"graph": "ring-based"}, star, directed],
    ids=["ring", "ring-based", "star", "circles"],
)
def test_neighbors_average_as_the_matrix_says_step_for_step(comm, plan, clock):
    size, length = comm.size, 10_000
    settings = plan(size) if size > 1 else {}
    edges = graphs.edges_of(settings.get("graph"), size)
    matrix = settings.get("mixing", graphs.mixing_matrix(edges, size))
    changed = changes(size, 12, length)
    everyones = np.arange(size)[:, None] + np.zeros(length)
    mine = everyones[comm.rank].copy()
    with NeighborAverage(comm, mine, clock=clock, **settings) as average:
        for call, change in enumerate(changed):
            loiter(comm.rank, call)
            mine += change[comm.rank]
            result = average(mine)
            everyones = matrix.T @ everyones + change
            np.testing.assert_allclose(mine, everyones[comm.rank], rtol=1e-12, atol=1e-12)
            assert result.version == call
            assert set(result.group) == {comm.rank, *np.nonzero(matrix[:, comm.rank])[0]}
        total = mine.copy()
        average.average(total)
        np.testing.assert_allclose(total, everyones.mean(axis=0), rtol=1e-12, atol=1e-12)
        assert average.statistics().calls == len(changed) == average.version


@pytest.mark.ranks(4)
def test_a_call_waits_for_neighbors_only_unless_the_clock_is_global(comm):
    """On a path, the end that is far from a rank that computes makes calls meanwhile."""
    graph = networkx.path_graph(comm.size)
    for clock, ahead in (("neighbors", comm.size - 1), ("global", 0)):
        mine = np.zeros(3)
        with NeighborAverage(comm, mine, graph=graph, clock=clock) as average:
            comm.Barrier()
            if comm.rank == 0:
                comm.recv(source=comm.size - 1)
                average(mine)
            elif comm.rank == comm.size - 1:
                # So many calls need nothing that rank 0 has not sent when it was made.
                for _ in range(ahead):
                    average(mine)
                comm.send("ahead", dest=0)
            for _ in range(comm.size - average.version):
                average(mine)


@pytest.mark.ranks(3, 4)
def test_arrays_of_several_types_travel_together_halves_in_single_precision(comm):
    types = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
    lengths = [5, 300_000, 3, 500_001]
    mine = [np.full(n, comm.rank, dtype) for n, dtype in zip(lengths, types)]
    matrix = graphs.mixing_matrix(graphs.ring(comm.size), comm.size)
    expected = np.arange(comm.size, dtype=np.float64)
    with NeighborAverage(comm, mine) as average:
        for _ in range(9):
            average(mine)
            expected = matrix.T @ expected
            for array, tolerance in zip(mine, (1e-3, 1e-2, 1e-6, 1e-12)):
                np.testing.assert_allclose(
                    array.astype(np.float64), expected[comm.rank], rtol=tolerance
                )
        average.average(mine)
        np.testing.assert_allclose(mine[3], (comm.size - 1) / 2, rtol=1e-12)


# Push-sum


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("way", [1, 2, "directed"])
def test_push_sum_keeps_both_sums_and_tends_to_the_weighted_mean(comm, way):
    size, length, weight = comm.size, 50_000, 1.0 + comm.rank
    settings = {"neighbors": 1 if size == 1 else way}
    if way == "directed":
        arms = [(i, (i + 1) % size) for i in range(size)] + [(0, i) for i in range(2, size)]
        settings = {"graph": networkx.DiGraph(arms) if size > 1 else networkx.empty_graph(1)}
    mine = np.full(length, comm.rank, np.float64)
    weights = 1.0 + np.arange(size)
    with PushSum(comm, mine, weight=weight, **settings) as average:
        numerators = weights @ np.arange(size)
        for call in range(6):
            loiter(comm.rank, call)
            mine += comm.rank
            average(mine)
            numerators += np.arange(size).sum()
            held = np.array(comm.allgather((average.weight * mine[0], average.weight)))
            np.testing.assert_allclose(held.sum(axis=0), (numerators, weights.sum()), rtol=1e-12)
        for _ in range(150 if way == "directed" else 40):
            average(mine)
        np.testing.assert_allclose(mine, numerators / weights.sum(), rtol=1e-6)
        average.average(mine)
        np.testing.assert_allclose(mine, numerators / weights.sum(), rtol=1e-12)
        assert_equal_everywhere(comm, mine)


# Pairs


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize(
    "make", [None, lambda size: "ring-based", networkx.cycle_graph, networkx.star_graph]
)
def test_pairs_keep_the_sum_and_are_averaged_whole(comm, make):
    """A vector that another average came into, or a late message, would have unequal elements."""
    size, length = comm.size, 50_000
    graph = make and make(size - (make is networkx.star_graph))
    mine = np.full(length, comm.rank, np.float64)
    with PairwiseAverage(comm, mine, graph=graph, seed=5) as average:
        total = sum(range(size))
        for call in range(40):
            loiter(comm.rank, call)
            mine += comm.rank
            total += sum(range(size))
            average(mine)
            np.testing.assert_allclose(mine, mine[0], rtol=1e-12)
            if call % 25 == 13:
                own, all_of_them = mine.copy(), mine.copy()
                average.average(all_of_them)
                np.testing.assert_allclose(all_of_them, total / size, rtol=1e-12)
                np.testing.assert_array_equal(mine, own)
        average.synchronize(mine)
        np.testing.assert_allclose(mine, total / size, rtol=1e-12)
        assert_equal_everywhere(comm, mine)
        statistics = average.statistics()
        assert statistics.versions > 0
        assert comm.allreduce(statistics.passive) * 2 == comm.allreduce(statistics.versions)


@pytest.mark.ranks(4)
def test_no_call_waits_for_a_rank_that_computes_which_is_averaged_meanwhile(comm):
    mine = np.full(1000, float(comm.rank))
    with PairwiseAverage(comm, mine, graph=networkx.star_graph(comm.size - 1)) as average:
        average(mine)
        comm.Barrier()
        if comm.rank:

            def has_averaged():
                average(mine)
                return average.statistics().versions > 2

            wait_until(has_averaged)
        compute_until(comm, everybody_else_is_done=comm.rank > 0)
        if comm.rank == 0:
            assert average.statistics().passive > 3
            before = mine.copy()
            average(mine)
            assert (mine != before).all()


# The parameter server


@pytest.mark.ranks(1, 3, 4, 8)
def test_a_synchronous_server_is_one_process_with_the_mean_of_all_changes(comm):
    changed = changes(comm.size, 10, 60_000)
    mine = np.zeros(60_000)
    expected = mine.copy()
    with ParameterServer(comm, mine, server=comm.size - 1) as server:
        for call, change in enumerate(changed):
            loiter(comm.rank, call)
            mine += change[comm.rank]
            server(mine)
            expected += change.mean(axis=0)
            np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)
            assert_equal_everywhere(comm, mine)


@pytest.mark.ranks(3, 4)
def test_an_asynchronous_server_loses_no_change_and_waits_for_nobody(comm):
    mine = np.zeros(500)
    with ParameterServer(comm, mine, mode="asp") as server:
        if comm.rank == 0:
            # The rank of the server itself computes, and serves meanwhile.
            compute_until(comm, everybody_else_is_done=False)
        else:
            for _ in range(20):
                mine += comm.rank
                server(mine)
            compute_until(comm, everybody_else_is_done=True)
        server.average(mine)
        np.testing.assert_allclose(mine, 20 * sum(range(comm.size)) / comm.size, rtol=1e-12)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_what_changed_after_the_last_call_is_in_the_model_of_a_server_that_all_join(comm, mode):
    calls, server = 2 + 2 * comm.rank, comm.size - 1
    made = changes(comm.size, 2 * comm.size + 1, 5)
    model = np.zeros(5)
    with ParameterServer(comm, model, mode=mode, server=server) as average:
        for call in range(calls):
            loiter(comm.rank, call)
            model += made[call, comm.rank]
            average(model)
        model += made[calls, comm.rank]
        average.join(model)
        assert average.version == 2 * comm.size
    of_all = sum(made[: 3 + 2 * rank, rank].sum(axis=0) for rank in range(comm.size))
    np.testing.assert_allclose(model, of_all / comm.size, rtol=1e-12)
    assert_equal_everywhere(comm, model)


@pytest.mark.ranks(3, 4)
def test_backups_drop_the_changes_of_a_rank_that_is_late_and_wait_for_nobody(comm):
    mine = np.zeros(500)
    late = comm.rank == comm.size - 1
    with ParameterServer(comm, mine, mode="backup", backups=1) as server:
        if not late:
            for _ in range(5):
                mine += 1
                server(mine)
            np.testing.assert_allclose(mine, 5, rtol=1e-12)
        compute_until(comm, everybody_else_is_done=not late)
        if late:
            mine += 100
            server(mine)
            np.testing.assert_allclose(mine, 5, rtol=1e-12)
        comm.Barrier()
        if comm.rank == 0:
            assert server.dropped == 1


@pytest.mark.ranks(3)
def test_a_change_to_an_old_model_counts_less_where_staleness_is_scaled(comm):
    mine = np.zeros(50)
    late = comm.rank == 2
    with ParameterServer(comm, mine, mode="hete") as server:
        for turn in range(2):
            for _ in range(3):
                if comm.rank == turn:
                    mine += 1
                    server(mine)
            comm.Barrier()
        if late:
            mine += 3  # to a model from before six other changes: two rounds
            server(mine)
        server.average(mine)
        # The other rank's first one was to a model from before three changes.
        np.testing.assert_allclose(mine, 3 / 3 + (0.5 + 2) / 3 + (3 / 3) / 3, rtol=1e-12)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("max_age", [None, 1, 3])
def test_a_server_drops_a_change_to_a_model_that_is_too_old_and_no_other(comm, max_age):
    """Ranks call one after the other, in an order that a seed draws."""
    size, given = comm.size, {"mode": "ringmaster", "max_age": max_age, "server": comm.size - 1}
    mine = np.zeros(50)
    model, version, dropped, held = 0.0, 0, 0, [0] * size
    with ParameterServer(comm, mine, **given) as server:
        assert server.max_age == (max_age or size)
        for change, rank in enumerate(np.random.default_rng(size).integers(size, size=40), 1):
            if version - held[rank] < server.max_age:
                model += change / size
                version += 1
            else:
                dropped += 1
            held[rank] = version
            if comm.rank == rank:
                mine += change
                server(mine)
                np.testing.assert_allclose(mine, model, rtol=1e-12)
            comm.Barrier()
        assert server.dropped == (dropped if comm.rank == server.server else 0)
        assert (dropped > 0) == (size > 1)
        # All have the newest model then, so that nothing is too old.
        server.synchronize(mine)
        np.testing.assert_allclose(mine, model, rtol=1e-12)
        server.average(mine)
        np.testing.assert_allclose(mine, model, rtol=1e-12)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("length", [50, 300_000])
def test_a_server_has_nesterov_s_momentum_after_as_many_changes_as_ranks(comm, length):
    """Ranks call one after the other, in an order that a seed draws."""
    size, mine = comm.size, np.zeros(length)
    turns = np.random.default_rng(size).integers(size, size=10 * size)
    model = momentum = gathered = 0.0
    given = {"outer_momentum": 0.5, "outer_rate": 0.8, "server": size - 1}
    with ParameterServer(comm, mine, mode="async-local", **given) as server:
        for count, rank in enumerate(turns, 1):
            change = count % 7 - 3
            model += 0.8 * change / size
            gathered += change / size
            if count % size == 0:
                momentum, gathered = 0.5 * momentum + gathered, 0.0
                model += 0.8 * 0.5 * momentum
            if comm.rank == rank:
                mine += change
                server(mine)
                np.testing.assert_allclose(mine, model, rtol=1e-9, atol=1e-12)
            comm.Barrier()
            if count == 5 * size:
                server.synchronize(mine)  # from here on without momentum
                np.testing.assert_allclose(mine, model, rtol=1e-9, atol=1e-12)
                momentum = gathered = 0.0


@pytest.mark.ranks(1, 3, 4)
def test_a_rank_learns_how_many_steps_it_makes_beside_the_fastest_one(comm):
    mine = np.zeros(3)
    with ParameterServer(comm, mine, mode="async-local") as server:
        server(mine)
        assert server.steps_beside(12) == 12
        server.speed = 1 + comm.rank
        server(mine)
        comm.Barrier()  # the server knows all speeds
        server(mine)
        assert server.steps_beside(12) == 12 * (1 + comm.rank) // comm.size
        with pytest.raises(ValueError, match="speed is -1"):
            server.speed = -1
        comm.Barrier()


@pytest.mark.ranks(3, 4)
def test_a_rank_that_is_too_slow_is_not_waited_for_and_changes_no_model(comm):
    mine = np.zeros(500)
    slow = comm.rank == comm.size - 1
    with ParameterServer(comm, mine, mode="ringmaster") as server:
        if not slow:
            for _ in range(comm.size):
                mine += 1
                server(mine)
        compute_until(comm, everybody_else_is_done=not slow)
        if slow:
            mine += 1000
            server(mine)
        server.average(mine)
        dropped = comm.bcast(server.dropped)
        counted = (comm.size - 1) * comm.size + 1 - dropped
        np.testing.assert_allclose(mine, counted / comm.size, rtol=1e-12)
        assert dropped >= 1


# All of them


@pytest.mark.ranks(4)
@each
def test_ranks_may_close_or_fail_at_any_time_and_nobody_hangs(comm, kind):
    """With long messages under way."""
    for ends_by in ("closing", "failing", "a bad vector"):
        mine = np.zeros(LONG)
        odd = comm.rank == 1
        errors = () if odd and ends_by != "a bad vector" else (ClosedError, RankFailedError)
        try:
            with kind(comm, mine) as collective:
                for call in range(60):
                    mine += 1
                    if odd and call == 3:
                        if ends_by == "closing":
                            break
                        if ends_by == "failing":
                            raise KeyError("mine")
                        collective(mine[:5])
                    collective(mine)
        except errors:
            pass
        except (KeyError, ValueError):
            assert odd
        assert collective.closed
        with pytest.raises(ClosedError):
            collective(mine)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
@each
def test_no_block_of_a_long_vector_is_lost_or_torn(comm, kind, engine):
    """Its parts stay the same, none of which is a block; some wait outside of calls for others."""
    parts, calls = 8, 6
    changed = changes(comm.size, calls + comm.size, LONG // parts)
    mine = np.zeros(LONG)
    with kind(comm, mine, engine=engine) as collective:
        for call in range(calls):
            mine += np.tile(changed[call, comm.rank], parts)
            loiter(comm.rank, call)
            collective(mine)
            assert (mine.reshape(parts, -1) == mine[: LONG // parts]).all()
            if call % 3 == 1:
                comm.Barrier()
            if call % 5 == 3:
                collective.synchronize(mine)
                total = np.tile(changed[: call + 1].mean(axis=1).sum(axis=0), parts)
                np.testing.assert_allclose(mine, total, rtol=1e-9, atol=1e-9)
        for call in range(calls, calls + comm.rank):
            mine += np.tile(changed[call, comm.rank], parts)
            collective(mine)
        mine += 1
        collective.join(mine)
    for rank in range(comm.size):
        changed[calls + rank :, rank] = 0
    total = np.tile(changed.mean(axis=1).sum(axis=0), parts)
    np.testing.assert_allclose(mine, total + 1, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(4)
@each_length
@each
def test_a_call_that_a_signal_interrupts_goes_on_without_its_vector(comm, kind, length):
    mine = np.full(length, 6.0)
    with kind(comm, mine) as collective:
        for _ in range(3):
            collective(mine)
        comm.Barrier()
        waits = kind is not PairwiseAverage
        if comm.rank == 0 and waits:
            with interrupted():
                # At the latest in the third its neighbors' part is missing.
                for _ in range(3):
                    collective(mine)
            collective.model(mine)
            np.testing.assert_allclose(mine, 6)
        comm.Barrier()
        while collective.version < 10:  # which counts the interrupted one when that is over
            mine += 1
            collective(mine)
        comm.Barrier()
        assert np.isfinite(mine).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtypes", [["float64"], ["float16"], ["float32", "float16", "float16"]])
@pytest.mark.parametrize("kind", [NeighborAverage, PushSum, ParameterServer])
def test_an_exception_right_after_the_engine_has_returned_changes_no_model(comm, kind, dtypes):
    mine = [np.zeros(5, dtype) for dtype in dtypes]

    with kind(comm, mine) as collective:

        def call_and_raise(arrays):
            collective.native.call_peers(arrays)
            raise Interrupted  # as a signal's handler then may

        for call in range(20):
            for array in mine:
                array += 12 * (comm.rank == 1 and call < 2)
            if comm.rank == 0 and call == 1:
                with collective._guard, pytest.raises(Interrupted):
                    collective._carry_out(call_and_raise, mine)
            else:
                collective(mine)
    for array in mine:
        np.testing.assert_allclose(array, 8, rtol=2e-3)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
@each
def test_after_synchronizing_or_loading_all_go_on_from_there(comm, kind, engine):
    mine = np.full(2000, float(comm.rank))
    with kind(comm, mine, engine=engine) as collective:
        for _ in range(4):
            collective(mine)
        collective.synchronize(mine)
        assert_equal_everywhere(comm, mine)
        for _ in range(4):
            collective(mine)
        np.testing.assert_allclose(mine, mine[0])
        assert_equal_everywhere(comm, np.round(mine, 9))
        assert collective.version == 8
        mine[:] = 7
        collective.load(mine, 3)
        assert collective.version == 3
        collective(mine)
        np.testing.assert_allclose(mine, 7)
        assert collective.statistics().communicating >= 0


@pytest.mark.ranks(4)
@each_length
@each
def test_a_change_that_is_not_finite_is_left_out(comm, kind, length):
    mine = np.zeros(length)
    with kind(comm, mine) as collective:
        for call in range(6):
            mine += 1
            if comm.rank == 2 and call == 2:
                mine[3] = np.nan
            collective(mine)
            assert np.isfinite(mine).all()
        assert collective.statistics().left_out == (comm.rank == 2)


@pytest.mark.ranks(3, 4)
@each
def test_ranks_that_join_and_average_at_a_time_say_so_and_nobody_hangs(comm, kind):
    mine = np.zeros(3)
    with kind(comm, mine) as collective:
        collective(mine)
        collective.synchronize(mine)
        odd = comm.rank == 0
        with pytest.raises(DisagreementError) as raised:
            collective.join(mine) if odd else collective.average(mine)
        what, others = ("join", "average") if odd else ("average", "join")
        assert f"rank {comm.rank} waits in {what}() after 1 call, which " in str(raised.value)
        assert f"entered {others}() after 1 call" in str(raised.value)
        assert f"entered {what}()" not in str(raised.value)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("operation", ["average", "synchronize", "load"])
@each
def test_a_rank_that_averages_while_others_call_is_named_and_nobody_hangs(comm, kind, operation):
    # A rank may hear that another has left because of it before it hears why.
    expected = pytest.raises((ClosedError, DisagreementError, RankFailedError))
    with after_a_call(comm, kind) as (collective, mine), expected as raised:
        if comm.rank == 0:
            getattr(collective, operation)(mine, *[1][: operation == "load"])
        else:
            for _ in range(5):
                collective(mine)
            collective.join(mine)
    said = "".join(comm.allgather(str(raised.value)))
    waits = kind in (NeighborAverage, QueuedNeighborAverage, PushSum)
    assert ("for rank 0, which is in average(), synchronize() or load()" in said) == waits
    assert f"rank 0 entered {operation}()" in said or waits


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ends", ["average", "close"])
@pytest.mark.parametrize("kind", [NeighborAverage, QueuedNeighborAverage, PushSum])
def test_who_has_joined_tells_whom_the_others_calls_wait_for(comm, kind, ends):
    with after_a_call(comm, kind) as (collective, mine):
        if comm.rank == 0 and ends == "close":
            collective.close()
            return
        # Or that another one has left because of that, if that is heard first.
        told = (ClosedError, RankFailedError, *[DisagreementError][: ends == "average"])
        with pytest.raises(told, match="ranks? 0|rank 1, which has closed"):
            if comm.rank == 2:
                for _ in range(5):
                    collective(mine)
            else:
                getattr(collective, "average" if comm.rank == 0 else "join")(mine)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [NeighborAverage, QueuedNeighborAverage, PushSum])
def test_a_rank_that_closes_fails_nobody(comm, kind):
    with after_a_call(comm, kind) as (collective, mine):
        if comm.rank == 1:
            return
        with pytest.raises(ClosedError, match="has closed"):
            for _ in range(6):
                loiter(comm.rank, collective.version)
                collective(mine)


ACKNOWLEDGED = {"graph": "ring", "mode": "notify-ack"}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("kind", "given", "calls"),
    [(NeighborAverage, {"clock": "global"}, 1), (QueuedNeighborAverage, ACKNOWLEDGED, 2)],
)
def test_who_closes_after_an_interrupted_call_sends_what_others_need_of_it(
    comm, kind, given, calls
):
    """Rank 2 calls when rank 0 closes, which waits for it in its last call."""
    mine = np.zeros(3)
    collective = kind(comm, mine, **given)
    if comm.rank == 0:
        for _ in range(calls - 1):
            collective(mine)
        with interrupted():
            collective(mine)
        collective.native.begin_close()
        comm.send("closes", dest=2)
    else:
        if comm.rank == 2:
            wait_until(lambda: comm.iprobe(source=0))
            comm.recv(source=0)
        for _ in range(calls):
            collective(mine)
    collective.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("operation", ["average", "synchronize", "join"])
@each
def test_an_interrupted_operation_of_all_ends_them_and_nobody_hangs(comm, kind, operation):
    with after_a_call(comm, kind) as (collective, mine):
        if comm.rank == 0:
            with interrupted():
                getattr(collective, operation)(mine)
            comm.send("interrupted", dest=1)
        else:
            if comm.rank == 1:
                wait_until(lambda: comm.iprobe(source=0))
                comm.recv(source=0)
            # Who has heard of rank 1's coming before it hears of the failure completes the
            # operation, for which rank 0's part had been there, and fails in the next one.
            with pytest.raises(RankFailedError):
                for _ in range(2):
                    getattr(collective, operation)(mine)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [NeighborAverage, PushSum, ParameterServer])
def test_halves_lose_no_small_change(comm, kind):
    mine = np.ones(3, np.float16)
    ulp = np.spacing(np.float16(1))
    with kind(comm, mine) as collective:
        for _ in range(64):
            if comm.rank == 1:
                mine += ulp
            collective(mine)
        collective.synchronize(mine)
    np.testing.assert_allclose(mine.astype(float), 1 + 64 / 3 * ulp, atol=ulp)


class Polled(PairwiseAverage):
    """Without progress threads, and yet with vectors in blocks, one of which a poll executes."""

    def _make_mailbox(self, native, messages, like, whole, ranks, sharing):
        return super()._make_mailbox(native, messages, like, False, ranks, sharing)


@pytest.mark.ranks(3)
@pytest.mark.transports("messages")
def test_the_rounding_of_halves_is_no_change_where_a_pair_is_averaged_meanwhile(comm):
    """Rank 0 notes what it got was rounded to, when an average has begun to save what it got."""
    pair = comm.Split(comm.rank < 2, comm.rank)
    if comm.rank < 2:
        round_in_an_average(pair)
    pair.Free()


def round_in_an_average(comm):
    ulp = float(np.spacing(np.float16(1)))
    mine, model = np.full(LONG, 1 + comm.rank * ulp, np.float16), np.empty(LONG, np.float32)
    with Polled(comm, mine, engine="none") as collective:
        native = collective.native
        for _ in range(3):
            comm.Barrier()  # from here to the next one rank 1 does not answer
            if comm.rank == 0:
                collective._carry_out(native.call_peers, mine)
            comm.Barrier()
            if comm.rank == 0:
                rounded = collective._wider([mine])
                assert native.mailbox.deciding.same
                while native.mailbox.deciding.same:
                    native.is_closing(1)  # polls once
                native.go_on_from(rounded)
                native.pause(True)
                native.pause(False)
            over = comm.Ibarrier()
            while not over.Test():
                native.is_closing(1 - comm.rank)
        collective._prepare(mine)
        native.read_model([model])
        native.pause(False)
    total = np.empty_like(model)
    comm.Allreduce(model, total)
    np.testing.assert_allclose(total, 2 + ulp, rtol=0, atol=0.05 * ulp)


@pytest.mark.ranks(4)
def test_several_of_them_and_a_group_allreduce_work_side_by_side(comm):
    vectors = [np.full(1000, float(comm.rank)) for _ in range(5)]
    group = GroupAllreduce(comm, vectors[4], group_size=2, sync_period=5)
    others = [kind(comm, vector) for kind, vector in zip(ALL.values(), vectors)]
    for call in range(20):
        for collective, vector in zip([*others, group], vectors):
            loiter(comm.rank, call)
            collective(vector)
    for collective in [*others, group]:
        collective.close()


RINGMASTER = {"mode": "ringmaster"}
BAD = {
    "no graph": (NeighborAverage, {"graph": 3}, TypeError, "not a networkx graph"),
    "other nodes": (NeighborAverage, {"graph": networkx.path_graph(7)}, ValueError, "the nodes"),
    "other name": (NeighborAverage, {"graph": "wheel"}, ValueError, "graph must be .*not 'wheel'"),
    "other machines": (
        PairwiseAverage,
        {"graph": "hierarchical-4+2"},
        ValueError,
        "has 6 ranks, not 4",
    ),
    "in parts": (
        NeighborAverage,
        {"graph": networkx.Graph([(0, 1), (2, 3)])},
        ValueError,
        "does not connect all ranks",
    ),
    "no weights": (
        NeighborAverage,
        {"graph": networkx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])},
        ValueError,
        "doubly stochastic",
    ),
    "shape": (NeighborAverage, {"mixing": np.eye(3)}, ValueError, "has the shape"),
    "off the graph": (NeighborAverage, {"mixing": np.full((4, 4), 0.25)}, ValueError, "no edge"),
    "sums": (NeighborAverage, {"mixing": np.eye(4) / 2}, ValueError, "sums to 0.5"),
    "negative": (NeighborAverage, {"mixing": -np.eye(4)}, ValueError, "negative"),
    "clock": (NeighborAverage, {"clock": "mine"}, ValueError, "not one of neighbors, global"),
    "hops": (PushSum, {"neighbors": 3}, ValueError, "not between 1 and 2"),
    "half a neighbor": (PushSum, {"neighbors": 0.5}, TypeError, "not an integer"),
    "no weight": (PushSum, {"weight": 0}, ValueError, "not between"),
    "infinite": (NeighborAverage, {"like": np.full(3, np.inf)}, ValueError, "not finite"),
    "seed": (PairwiseAverage, {"seed": -1}, ValueError, "seed is -1"),
    "one way": (
        PairwiseAverage,
        {"graph": networkx.cycle_graph(4, networkx.DiGraph)},
        ValueError,
        "one direction only",
    ),
    "mode": (ParameterServer, {"mode": "ssp"}, ValueError, "not one of bsp, backup, asp, "),
    "backups": (ParameterServer, {"backups": 4}, ValueError, "not between 0 and 3"),
    "server": (ParameterServer, {"server": "0"}, TypeError, "not an integer"),
    "age": (ParameterServer, RINGMASTER | {"max_age": 0}, ValueError, "max_age is 0, less than 1"),
    "half an age": (ParameterServer, RINGMASTER | {"max_age": 1.5}, TypeError, "not an integer"),
    "age of asp": (
        ParameterServer,
        {"mode": "asp", "max_age": 2},
        ValueError,
        "max_age is 2, but mode is 'asp', not 'ringmaster'",
    ),
    "momentum": (
        ParameterServer,
        {"mode": "async-local", "outer_momentum": 1},
        ValueError,
        "outer_momentum is 1, but must be less than 1",
    ),
    "rate": (ParameterServer, {"mode": "async-local", "outer_rate": -1}, ValueError, "outer_rate"),
    "rate of bsp": (ParameterServer, {"outer_rate": 1}, ValueError, "not 'async-local'"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "settings", "error", "text"), BAD.values(), ids=BAD)
def test_a_bad_argument_on_one_rank_raises_on_all(comm, kind, settings, error, text):
    with pytest.raises(error, match=text) as raised:
        kind(comm, **{"like": np.zeros(3), **(settings if comm.rank == 2 else {})})
    assert same_everywhere(comm, str(raised.value))
    assert "rank 2" in str(raised.value)


@pytest.mark.ranks(4)
def test_settings_that_differ_are_named(comm):
    odd = comm.rank == 3
    with pytest.raises(ValueError, match="clock differs between ranks"):
        NeighborAverage(comm, np.zeros(3), clock="global" if odd else "neighbors")
    with pytest.raises(ValueError, match="graph differs between ranks"):
        PushSum(comm, np.zeros(3), neighbors=2 if odd else 1)
    with pytest.raises(
        ValueError, match="mode differs between ranks: bsp on ranks 0-2; asp on rank 3"
    ):
        ParameterServer(comm, np.zeros(3), mode="asp" if odd else "bsp")


@pytest.mark.ranks(4)
def test_a_call_that_waits_for_long_says_for_whom(comm, caplog):
    mine = np.zeros(3)
    with NeighborAverage(comm, mine, stall=0.2) as average, caplog.at_level(logging.WARNING):
        comm.Barrier()
        if comm.rank == 2:
            wait_until(lambda: comm.iprobe(source=1))
            comm.recv(source=1)
        elif comm.rank == 1:
            with interrupted(once=lambda: caplog.records):
                for _ in range(3):
                    average(mine)
            comm.send("said", dest=2)
            assert re.search(r"for .*\b2: still computing \(0 calls completed\)", caplog.text)
        while average.version < 4:
            average(mine)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("mode", ["bsp", "asp", "hete", "backup", "async-local"])
def test_what_has_changed_since_the_last_call_goes_to_the_server_when_all_synchronize(
    comm, mode, dtype
):
    mine = np.zeros(5, dtype)
    with ParameterServer(comm, mine, mode=mode) as server:
        for period in range(3):
            before = mine[0]
            mine += comm.size * (comm.rank + period)
            server.synchronize(mine)
            mean = comm.size * ((comm.size - 1) / 2 + period)
            np.testing.assert_allclose(mine, before + mean, rtol=1e-6)
            assert_equal_everywhere(comm, mine)
            server(mine)
            server.synchronize(mine)  # nothing has changed
            np.testing.assert_allclose(mine, before + mean, rtol=1e-6)


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", [NeighborAverage, PushSum, ParameterServer])
def test_a_failed_rank_s_reason_is_waited_for_when_it_closes(comm, kind):
    """Rank 3 computes, and so forwards the failure of rank 2 late; the others wait for rank 2."""
    mine = np.zeros(3)
    collective = kind(comm, mine, engine="none")
    comm.Barrier()
    if comm.rank == 3:
        time.sleep(0.5)
    if comm.rank == 2:
        collective.fail(KeyError("the dataset is gone"))
    else:
        with pytest.raises(RankFailedError, match="rank 2 failed.*the dataset is gone"):
            for _ in range(3):
                collective(mine)
    collective.close()
