"""Partial Reduce in simulated time: beside a slow rank, and what its filter costs."""

import numpy as np
import pytest
from ready_groups import controllers

from wagma.methods import METHODS
from wagma.simulation import FREE, MACHINES, Settings, simulate


def with_a_slow_rank(size, jitter=0.1, steps=900):
    """Return steps of 0.1 s, but for one rank, whose are six times as long."""
    times = 0.1 * np.random.default_rng(size).lognormal(0, jitter, (steps, size))
    times[:, size // 2] *= 6
    return times


def throughput(times, group_size, history, machine=MACHINES["10gbe"]):
    chosen = Settings(10**6, group_size=group_size, history=history)
    return simulate("partial-reduce", times, machine, chosen, 60.0).throughput


NEVER = 10**5  # so many groups are not formed: the filter is off


def test_the_filter_takes_nothing_from_the_throughput_beside_a_slow_rank():
    times = with_a_slow_rank(8)
    free = throughput(times, 3, NEVER)
    assert throughput(times, 3, controllers.shortest_history(8, 3)) > 0.98 * free
    # Nobody waits for the slow rank: seven of the eight make most of the steps that they can.
    assert free > 0.8 * (7 + 1 / 6) / times[:, 0].mean()


@pytest.mark.parametrize(("size", "group_size"), [(8, 2), (8, 3), (16, 3), (64, 4)])
def test_with_the_default_history_it_is_as_good_as_off(size, group_size):
    times = with_a_slow_rank(size)
    free = throughput(times, group_size, NEVER)
    assert throughput(times, group_size, None) > 0.998 * free


def test_a_simulated_controller_forms_groups_as_long_as_ranks_are_there():
    times = np.random.default_rng(2).uniform(0.05, 0.2, (20, 10))
    times[:3, 4] = 1.0
    result = simulate("partial-reduce", times, MACHINES["10gbe"], Settings(10**6, group_size=4))
    assert result.made.tolist() == [20] * 10
    again = simulate("partial-reduce", times, MACHINES["10gbe"], Settings(10**6, group_size=4))
    assert again.wall == result.wall
    # All in one group is Allreduce's wait.
    everybody = simulate("partial-reduce", times, FREE, Settings(1, group_size=10))
    assert everybody.wall == pytest.approx(times.max(axis=1).sum())


def test_options_that_a_job_cannot_have_together_are_refused():
    method = METHODS["partial-reduce"]

    def problem(ranks, **options):
        return method.problem(method.resolved(options), ranks)

    assert problem(4, group_size=1).startswith("group_size is 1, but")
    assert problem(4, group_size=5) == "group_size is 5, more than the number of ranks, 4"
    assert problem(4, controller_rank=4) == "controller_rank is 4, but the last rank is 3"
    assert problem(9, history=3).startswith("history is 3, but at least 4 groups")
    for fine in ({}, {"history": 2}, {"group_size": 2, "history": 3}, {"controller_rank": 3}):
        assert problem(4, **fine) is None
    assert problem(1) is None


def test_one_rank_trains_alone():
    result = simulate("partial-reduce", np.ones((5, 1)), FREE, Settings(8, group_size=1))
    assert (result.wall, result.made.tolist()) == (5, [5])


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"group_size": 1}, "group_size is 1, not between 2 and 4"),
        ({"group_size": 5}, "group_size is 5, not between 2 and 4"),
        ({"group_size": 2, "history": 2}, "history is 2, less than 3"),
    ],
)
def test_what_cannot_be_simulated_is_named(chosen, text):
    with pytest.raises(ValueError, match=text):
        simulate("partial-reduce", np.ones((3, 4)), FREE, Settings(8, **chosen))
