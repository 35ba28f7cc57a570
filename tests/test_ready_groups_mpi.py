"""Averages in groups of the ranks that are ready first, over MPI."""

from __future__ import annotations

import collections
import os
import threading
import time

import numpy as np
import psutil
import pytest
from together import interrupted, same_everywhere, wait_until

from collectives import (
    ClosedError,
    GeneratedGroupAllreduce,
    RankFailedError,
    ReadyGroupAllreduce,
    dynamic_weights,
)
from collectives.topology import averaging_matrix, rho

pytestmark = pytest.mark.mpi

SHORT, LONG = 3, 70_000  # the latter in slices


def loiter(rank, call, seconds=0.004):
    """Let ranks come in any order."""
    time.sleep(seconds * np.random.default_rng((rank, call)).random())


def change(length, rank, call):
    return np.random.default_rng([rank, call]).standard_normal(length)


def group_size_of(comm):
    return min(3, max(comm.size, 2))


class Recorder:
    """Makes calls, and remembers the group, the vectors and the iterations of each."""

    def __init__(self, collective, vector):
        self.collective, self.vector = collective, vector
        self.calls = []

    def call(self, number):
        self.vector += change(self.vector.size, self.collective.rank, number)
        before = self.vector.copy()
        iteration = self.collective._protocol.iteration + 1
        result = self.collective(self.vector)
        assert result.version == self.collective.version - 1
        assert self.collective.rank in result.group and result.timely
        after = self.collective._protocol.iteration
        self.calls.append((result.group, before, self.vector.copy(), iteration, after))

    def everyones(self):
        """Return what the members of each group gave and got, as lists in the members' order."""
        times, mine = collections.Counter(), {}
        for group, *rest in self.calls:
            mine[group, times[group]] = rest
            times[group] += 1
        ranks = self.collective.comm.allgather(mine)
        keys = set().union(*ranks)
        found = []
        for group, number in keys:
            # Ranks that have several groups in common are in these in the same order.
            found.append((group, *zip(*[ranks[member][group, number] for member in group])))
        assert sum(len(group) for group, *_ in found) == sum(map(len, ranks))
        return found


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("controller_rank", [0, -1])
def test_all_members_of_a_group_get_its_mean(comm, length, controller_rank):
    mine = np.full(length, float(comm.rank))
    calls = 20 if length == SHORT else 8
    chosen = {"group_size": group_size_of(comm), "controller_rank": controller_rank % comm.size}
    with ReadyGroupAllreduce(comm, mine, **chosen) as allreduce:
        recorder = Recorder(allreduce, mine)
        for call in range(calls):
            loiter(comm.rank, call)
            recorder.call(call)
        allreduce.average(mine.copy())
        at_controller = comm.rank == chosen["controller_rank"]
        matrix, measured = allreduce.averaging_matrix(), allreduce.rho
    groups = []
    for group, befores, afters, iterations, newest in recorder.everyones():
        for after in afters:
            assert after.tobytes() == afters[0].tobytes()
        np.testing.assert_allclose(afters[0], np.mean(befores, axis=0), rtol=1e-12, atol=1e-14)
        assert set(newest) == {max(iterations)}
        if len(group) > 1:
            groups.append(group)
    full = [group for group in groups if len(group) == min(3, comm.size)]
    assert len(full) >= (calls if comm.size > 1 else 0)
    if at_controller and groups:
        np.testing.assert_allclose(matrix, averaging_matrix(groups, comm.size), atol=1e-12)
        assert measured == pytest.approx(rho(matrix))
    else:
        assert matrix is None and measured is None


def hold_up_rank_0(comm, after, meanwhile):
    """Rank 2 stops it for two seconds, longer than it waits for ranks.

    Args:
        after: seconds before that.
        meanwhile: ranks that go on once it has stopped.
    """
    controller = psutil.Process(comm.bcast(os.getpid()))
    if comm.rank == 2:
        time.sleep(after)
        controller.suspend()
        threading.Timer(2, controller.resume).start()
    elif comm.rank in meanwhile:
        wait_until(lambda: controller.status() == psutil.STATUS_STOPPED)


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("usual_patience")
def test_a_controller_that_was_held_up_drops_nobody_who_is_ready(comm):
    """It is stopped for longer than it would wait, while two ranks' signals arrive."""
    mine = np.full(SHORT, float(comm.rank))
    with ReadyGroupAllreduce(comm, mine, group_size=3) as allreduce:
        hold_up_rank_0(comm, 0.3, [3])  # after rank 1's signal
        group = allreduce(mine).group if comm.rank else (1, 2, 3)
        assert comm.allgather(group) == 4 * [(1, 2, 3)]
    assert comm.rank == 0 or (mine == 2).all()


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("usual_patience")
def test_ranks_that_were_grouped_while_the_controller_was_held_up_are_not_late(comm):
    """Nobody is ready before it is stopped; rank 0 itself comes afterwards."""
    mine = np.full(SHORT, float(comm.rank))
    with ReadyGroupAllreduce(comm, mine, group_size=2) as allreduce:
        hold_up_rank_0(comm, 0, [1, 3])
        if comm.rank == 0:
            comm.recv(tag=1)  # from one whose group was formed
        group = allreduce(mine).group
        if comm.rank in (1, 2, 3) and 0 not in group:
            comm.isend("formed", dest=0, tag=1).wait()
        assert len(group) == 2
        comm.Barrier()
        if comm.rank == 0:
            comm.recv(tag=1)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("weights", "missing", "dtype"),
    [
        ("dynamic", "nearest", np.float64),
        ("dynamic-each", "nearest", np.float16),
        ("dynamic", "initial", np.float32),
    ],
)
def test_dynamic_weights_count_older_models_less(comm, weights, missing, dtype):
    """One rank makes few calls, and is behind in its groups."""
    initial = change(SHORT, 99, 99).astype(dtype)
    mine = initial.copy()
    slow = comm.rank == comm.size - 1
    chosen = {"group_size": 2, "weights": weights, "alpha": 0.7, "missing": missing}
    each = weights == "dynamic-each"
    with ReadyGroupAllreduce(comm, mine, **chosen) as allreduce:
        recorder = Recorder(allreduce, mine)
        for call in range(3 if slow else 30):
            loiter(comm.rank, call, 0.02 if slow else 0.002)
            recorder.call(call)
            if comm.rank == 0 and call == 14:
                comm.recv(source=comm.size - 1)
            elif slow and call == 2:
                comm.send(None, dest=0)
        assert allreduce.averaging_matrix() is None and allreduce.rho is None
        share = allreduce.initial_share
    rounding = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-2}[mine.dtype.name]
    gaps, mixed = 0, collections.Counter()
    for group, befores, afters, iterations, newest in recorder.everyones():
        shares, left = dynamic_weights(iterations, 0.7, missing, each=each)
        expected = sum(w * before.astype(float) for w, before in zip(shares, befores))
        expected += left * initial.astype(float)
        for after in afters:
            assert after.tobytes() == afters[0].tobytes()
        np.testing.assert_allclose(afters[0], expected, rtol=rounding, atol=rounding)
        assert set(newest) == {max(iterations)}
        gaps += len(set(iterations)) > 1
        mixed.update({member: left / (3 if member == comm.size - 1 else 30) for member in group})
    assert gaps > 0
    assert share == pytest.approx(mixed[comm.rank])
    assert missing == "initial" or share == 0


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_ranks_may_make_any_numbers_of_calls(comm, length):
    """Whoever is left averages in smaller groups."""
    mine = np.full(length, float(comm.rank))
    calls = 4 + 5 * comm.rank
    with ReadyGroupAllreduce(comm, mine, group_size=group_size_of(comm)) as allreduce:
        for call in range(calls):
            loiter(comm.rank, call, 0.001)
            result = allreduce(mine)
        assert allreduce.version == calls
    everyones = comm.allgather(mine)
    assert comm.rank in result.group and len(result.group) <= group_size_of(comm)
    assert sum(everyones)[0] == pytest.approx(sum(range(comm.size)), rel=1e-12)


@pytest.mark.ranks(3, 4, 8)
def test_ranks_that_join_are_in_no_group_until_all_have_joined(comm):
    mine = np.full(LONG, float(comm.rank))
    with ReadyGroupAllreduce(comm, mine, group_size=group_size_of(comm)) as allreduce:
        for epoch in range(3):
            calls = 1 + 4 * ((comm.rank + epoch) % comm.size)
            for call in range(calls):
                loiter(comm.rank, call, 0.002)
                allreduce(mine)
            allreduce.join(mine)
            assert allreduce.version == (epoch + 1) * (4 * comm.size - 3)
            assert same_everywhere(comm, mine.tobytes())
            np.testing.assert_allclose(mine, (comm.size - 1) / 2, rtol=1e-12)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_averages_of_all_between_the_calls(comm, engine):
    mine = np.full(LONG, float(comm.rank))
    chosen = {"group_size": 2, "weights": "dynamic", "engine": engine}
    with ReadyGroupAllreduce(comm, mine, **chosen) as allreduce:
        for turn in range(6):
            for call in range(turn):
                loiter(comm.rank, call, 0.002)
                mine += comm.rank
                allreduce(mine)
            before = mine.copy()
            if turn % 2 == 0:
                total = mine.copy()
                allreduce.average(total)
                expected = np.mean(comm.allgather(before), axis=0)
                np.testing.assert_allclose(total, expected, rtol=1e-12)
                assert mine.tobytes() == before.tobytes()
                continue
            allreduce.synchronize(mine)
            expected = np.mean(comm.allgather(before), axis=0)
            np.testing.assert_allclose(mine, expected, rtol=1e-12)
            assert same_everywhere(comm, mine.tobytes())
        assert allreduce.version == sum(range(6))


def take_turns(allreduce, vector, pairs):
    """Let pairs of ranks make a call, one after the other."""
    comm = allreduce.comm
    for pair in pairs:
        if comm.rank in pair:
            assert allreduce(vector).group == pair
        comm.Barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["synchronize", "join", "load", "average"])
def test_after_all_go_on_together_their_models_are_as_new(comm, how):
    mine = np.zeros(SHORT)
    chosen = {"group_size": 2, "weights": "dynamic"}
    with ReadyGroupAllreduce(comm, mine, **chosen) as allreduce:
        take_turns(allreduce, mine, [(0, 1), (0, 1), (2, 3)])
        getattr(allreduce, how)(mine, *([7] if how == "load" else []))
        assert allreduce.version == {"join": 2, "load": 7}.get(how, 1 if comm.rank > 1 else 2)
        mine[:] = comm.rank
        take_turns(allreduce, mine, [(0, 2)])
        # At α = 0.5 a model that is one iteration older counts half as much.
        expected = [2 / 3, 1, 2 / 3, 3] if how == "average" else [1, 1, 1, 3]
        np.testing.assert_allclose(mine, expected[comm.rank], rtol=1e-14)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("controller_rank", [0, 3])
def test_no_rank_waits_for_a_slow_one(comm, controller_rank):
    """Three ranks make all their calls while one computes, be it the controller's."""
    mine = np.full(SHORT, float(comm.rank))
    chosen = {"group_size": 3, "controller_rank": controller_rank}
    with ReadyGroupAllreduce(comm, mine, **chosen) as allreduce:
        done = comm.Ibarrier() if comm.rank < 3 else None
        if comm.rank < 3:
            for _ in range(20):
                assert allreduce(mine).group == (0, 1, 2)
            comm.send(None, dest=3)
        else:
            for source in range(3):
                wait_until(lambda source=source: comm.iprobe(source=source))
                comm.recv(source=source)
            done = comm.Ibarrier()
        done.Wait()
        result = allreduce(mine)
    groups = comm.allgather(result.group)
    assert 3 in groups[3]
    np.testing.assert_allclose(sum(comm.allgather(mine)), 6, rtol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_that_a_signal_interrupts_comes_to_its_end(comm, goes_on):
    mine = np.full(LONG, float(comm.rank))
    with ReadyGroupAllreduce(comm, mine, group_size=4) as allreduce:
        if comm.rank == 1:
            with interrupted():
                allreduce(mine)
            np.testing.assert_array_equal(mine, 1)
            if not goes_on:
                allreduce.native.begin_close()
            comm.send(None, dest=0)
        elif comm.rank == 0:
            # Else it would be in a group with the others.
            wait_until(lambda: comm.iprobe(source=1))
            comm.recv(source=1)
            # The notice that rank 1 leaves may come later: it has a communicator of its own.
            wait_until(lambda: goes_on or allreduce._protocol.controller.alone == 1)
        if comm.rank != 1:
            group = allreduce(mine).group
            assert group == ((0, 1, 2, 3) if goes_on else (0, 2, 3))
            np.testing.assert_allclose(mine, 1.5 if goes_on else 5 / 3, rtol=1e-14)
        comm.Barrier()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("ends_by", ["failing", "a bad vector"])
def test_a_rank_that_fails_ends_all_calls(comm, ends_by, odd):
    """Be it the controller's or another."""
    mine = np.zeros(LONG)
    mine_fails = comm.rank == odd
    error = {"failing": KeyError, "a bad vector": ValueError}[ends_by]
    with (
        pytest.raises(error if mine_fails else (RankFailedError, ClosedError)),
        ReadyGroupAllreduce(comm, mine, group_size=2) as allreduce,
    ):
        for call in range(10**6):
            mine += 1
            if mine_fails and call == 5:
                if ends_by == "failing":
                    raise KeyError("mine")
                allreduce(mine[:5])
            allreduce(mine)
            time.sleep(0.0005)
    assert allreduce.closed


@pytest.mark.ranks(4)
@pytest.mark.parametrize("alone", [0, 2])
def test_a_call_ends_without_ranks_that_wait_for_it_elsewhere(comm, alone):
    """Whoever is left over waits for a next call of others, which wait for it in a barrier."""
    mine = np.full(SHORT, float(comm.rank))
    with ReadyGroupAllreduce(comm, mine, group_size=2, controller_rank=2, stall=0.2) as allreduce:
        if comm.rank == alone:
            assert allreduce(mine).group == (alone,)
            np.testing.assert_array_equal(mine, comm.rank)
        comm.Barrier()
        allreduce(mine)
        comm.Barrier()


@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
@pytest.mark.parametrize("make", [ReadyGroupAllreduce, GeneratedGroupAllreduce])
@pytest.mark.usefixtures("usual_patience")
def test_a_rank_that_is_elsewhere_costs_one_wait_and_not_one_for_each_call(comm, make):
    """At first one waits for the others' message, later two are in a barrier. It takes a second."""
    mine = np.full(SHORT, float(comm.rank))
    with make(comm, mine, group_size=4, stall=30) as allreduce:
        began = time.monotonic()
        if comm.rank == 3:
            comm.recv(source=0)
        for _ in range(10):
            allreduce(mine)
        if comm.rank == 0:
            comm.send(None, dest=3)
        for _ in range(20 if comm.rank >= 2 else 0):
            time.sleep(0.002)
            allreduce(mine)
        comm.Barrier()
        assert time.monotonic() - began < 15
        allreduce(mine)


@pytest.mark.ranks(4)
def test_several_arrays_and_one_that_is_not_finite(comm):
    mine = [np.full(70_001, comm.rank, np.float32), np.full(5, comm.rank, np.float16)]
    initial = [np.zeros_like(array) for array in mine]
    chosen = {"group_size": 4, "weights": "dynamic", "missing": "initial"}
    with ReadyGroupAllreduce(comm, initial, **chosen) as allreduce:
        if comm.rank == 3:
            mine[1][0] = np.nan
        result = allreduce(mine)
        assert result.timely == (comm.rank != 3) and result.weight == pytest.approx(0.75)
        for array in mine:
            np.testing.assert_allclose(array, 1, rtol=1e-3)
        for array in mine:
            array[:] = np.inf
        result = allreduce(mine)
        assert result.weight == 0 and np.isinf(mine[0]).all()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("make", [ReadyGroupAllreduce, GeneratedGroupAllreduce])
def test_the_controllers_rank_may_do_nothing_else(comm, make):
    """Its vector is in no average of all ranks either."""
    last = comm.size - 1
    mine = np.full(SHORT, 1e6 if comm.rank == last else float(comm.rank))
    mean = (last - 1) / 2
    with make(comm, mine, controller_rank=last, controller_only=True) as allreduce:
        assert allreduce.participates == (comm.rank != last)
        if allreduce.participates:
            assert last not in allreduce(mine).group
        else:
            time.sleep(0.05)
        averaged = mine.copy()
        allreduce.average(averaged)
        np.testing.assert_allclose(averaged, mean, rtol=1e-14)
        for _ in range(3 * (comm.rank + 1) if allreduce.participates else 0):
            result = allreduce(mine)
            assert last not in result.group
        allreduce.join(mine)
        np.testing.assert_allclose(mine, mean, rtol=1e-14)
        assert allreduce.version == 1 + 3 * last


@pytest.mark.ranks(3)
def test_the_controllers_own_rank_is_told_to_make_no_calls(comm):
    mine = np.zeros(SHORT)
    text = "rank 1 makes no calls: it only runs the controller"
    with (
        pytest.raises(RuntimeError if comm.rank == 1 else RankFailedError, match=text),
        ReadyGroupAllreduce(comm, mine, controller_rank=1, controller_only=True) as allreduce,
    ):
        while True:
            allreduce(mine)
            time.sleep(0.001)


WRONG = {
    "only": ({"controller_only": 1}, TypeError, "controller_only is 1, neither True nor False"),
    "too large": (
        {"controller_only": True, "group_size": 4},
        ValueError,
        "group_size is 4, not between 2 and 3",
    ),
    "one": ({"group_size": 1}, ValueError, "group_size is 1, not between 2 and 4"),
    "five": ({"group_size": 5}, ValueError, "group_size is 5, not between 2 and 4"),
    "half": ({"group_size": 2.5}, TypeError, "group_size is 2.5, not an integer"),
    "weights": ({"weights": "equal"}, ValueError, "weights is 'equal', not one of constant, dyn"),
    "alpha": ({"alpha": 1.0}, ValueError, "alpha is 1, but must be at least 0 and less than 1"),
    "missing": ({"missing": "none"}, ValueError, "missing is 'none', not one of nearest, initial"),
    "history": ({"group_size": 3, "history": 1}, ValueError, "history is 1, less than 2"),
    "long": ({"history": 2**31}, ValueError, f"history is {2**31}, more than {2**20}"),
    "seldom": ({"sync_every": 2**70}, ValueError, f"sync_every is {2**70}, more than {2**60}"),
    "nobody": ({"controller_rank": 4}, ValueError, "controller_rank is 4, not between 0 and 3"),
    "engine": ({"engine": "steam"}, ValueError, "engine .* is 'steam'"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("arguments", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise_on_all_ranks(comm, arguments, error, text):
    given = arguments if comm.rank == 2 or "engine" in arguments else {}
    with pytest.raises(error, match=text):
        ReadyGroupAllreduce(comm, np.zeros(3), **given)


@pytest.mark.ranks(4)
def test_what_must_not_differ_between_ranks_is_named(comm):
    text = "history differs between ranks: 9 on rank 0; 10 on rank 1"
    with pytest.raises(ValueError, match=text):
        ReadyGroupAllreduce(comm, np.zeros(3), history=9 + comm.rank)
    chosen = {"weights": "dynamic", "missing": "initial"}
    with pytest.raises(ValueError, match="like, the initial model, differs between ranks"):
        ReadyGroupAllreduce(comm, np.full(3, float(comm.rank)), **chosen)
    with pytest.raises(ValueError, match="like is not finite"):
        ReadyGroupAllreduce(comm, np.full(3, np.nan), **chosen)


@pytest.mark.ranks(1, 3, 4)
def test_by_default_three_ranks_average_or_all_there_are(comm):
    with ReadyGroupAllreduce(comm, np.zeros(3)) as allreduce:
        assert allreduce.group_size == min(3, comm.size)
        assert allreduce.history == {1: 3, 3: 5, 4: 6}[comm.size]
    if comm.size == 1:
        with ReadyGroupAllreduce(comm, np.zeros(3), group_size=8) as allreduce:
            assert allreduce(np.ones(3)).group == (0,)
