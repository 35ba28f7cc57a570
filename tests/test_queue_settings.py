"""Hop's settings: what they are by default, which are wrong, and a staleness that has no effect."""

import dataclasses

import networkx
import numpy as np
import pytest

from collectives import graphs
from collectives.protocols.queued_neighbor_average import QueuedNeighborAverageProtocol
from collectives.queue_settings import QueueSettings
from wagma.methods import METHODS
from wagma.simulation import FREE, Settings, simulate
from wagma.simulation.core import Simulation
from wagma.simulation.peers import PeerMethod

HOP = METHODS["hop"]
DIRECTED = frozenset((i, (i + hop) % 8) for i in range(8) for hop in (1, 3))
GRAPHS = {
    "ring-based": graphs.ring_based(8),
    "directed ring": frozenset((i, (i + 1) % 8) for i in range(8)),
    "two hops": DIRECTED,
}


def draws(seed):
    """Seconds of steps that differ much, so that each bound of the settings is reached."""
    generator = np.random.default_rng(seed)
    made = np.exp(0.8 * generator.standard_normal((120, 8)))
    made[20 * np.arange(1, 5), generator.choice(8, 4, replace=False)] = 200
    return made


def waited(edges, settings, seed):
    """Return each rank's seconds in calls, simulated on a graph without a name."""
    chosen = settings.checked(edges, 8)

    def make(port, rank, size):
        into, to = graphs.sources(edges, rank), graphs.destinations(edges, rank)
        return QueuedNeighborAverageProtocol(port, rank, size, into, to, **chosen.of_rank(rank))

    simulation = Simulation(PeerMethod(make, 8), FREE, draws(seed), None)
    simulation.run()
    return simulation.waited.tolist()


def test_by_default_a_staleness_is_waited_for_whatever_it_is():
    """With a gap of 5 for all, 4, 5 and 1000 had identical times."""
    walls = [
        simulate("hop", draws(0), FREE, Settings(8, staleness=s, graph="ring-based")).wall
        for s in (0, 1, 3, 4, 5, 7, 1000)
    ]
    assert walls == sorted(walls, reverse=True) and len(set(walls)) == len(walls)
    free = Settings(8, staleness=7, graph="ring-based", max_gap=None)
    assert simulate("hop", draws(0), FREE, free).wall == walls[5]


@pytest.mark.parametrize(
    "staleness, gap", ((None, 5), (0, 5), (3, 5), (4, 6), (5, 7), (2**20 - 2, 2**20))
)
def test_the_gap_follows_from_the_staleness(staleness, gap):
    checked = QueueSettings(staleness=staleness).checked(graphs.ring(4), 4)
    assert checked.max_gap == gap
    assert checked.inert(graphs.ring(4), 4) is None
    assert checked.checked(graphs.ring(4), 4) == checked


@pytest.mark.parametrize("order", ("parallel", "serial"))
@pytest.mark.parametrize("edges", GRAPHS.values(), ids=GRAPHS)
def test_a_warning_is_given_exactly_where_a_larger_staleness_changes_no_time(edges, order):
    for staleness in (1, 4, 6):
        for gap in (1, 2, 4, 5, 6, 7):
            settings = QueueSettings(gap, staleness=staleness, order=order)
            larger = dataclasses.replace(settings, staleness=1000)
            same = all(waited(edges, settings, n) == waited(edges, larger, n) for n in range(3))
            warning = settings.checked(edges, 8).inert(edges, 8)
            assert (warning is not None) == same, (staleness, gap)
            if warning:
                least = int(warning.split()[-1])
                better = dataclasses.replace(settings, max_gap=least)
                assert better.checked(edges, 8).inert(edges, 8) is None
                fewer = dataclasses.replace(settings, max_gap=max(1, least - 1))
                assert fewer.checked(edges, 8).inert(edges, 8)


def test_ways_back_are_those_of_networkx():
    for edges in GRAPHS.values():
        paths = dict(networkx.all_pairs_shortest_path_length(networkx.DiGraph(sorted(edges))))
        assert graphs.longest_way_back(edges, 8) == max(paths[b][a] for a, b in edges)
    assert graphs.longest_way_back(frozenset(), 1) == 1


def test_backups_are_of_each_rank():
    star = frozenset({(0, i) for i in range(1, 4)} | {(i, 0) for i in range(1, 4)})
    checked = QueueSettings(backup=[3, 1, 0, 1]).checked(star, 4)
    assert [checked.of_rank(rank)["backup"] for rank in range(4)] == [3, 1, 0, 1]
    assert QueueSettings(backup=np.array([1, 1, 1, 1])).checked(star, 4).backup == 1
    assert QueueSettings(backup=np.int64(1)).checked(star, 4).backup == 1
    for backup, error, text in (
        (2, ValueError, "backup is 2, not between 0 and 1"),
        ([4, 1, 1, 1], ValueError, r"backup\[0\] is 4, not between 0 and 3"),
        ([3, 2, 1, 1], ValueError, r"backup\[1\] is 2, not between 0 and 1"),
        ([1, 1], ValueError, "backup has 2 numbers, not one for each of 4 ranks"),
        ([1, 1, 0.5, 1], TypeError, r"backup\[2\] is 0.5, not an integer"),
        ("1", TypeError, "backup"),
        (None, TypeError, "backup is None, not an integer"),
    ):
        with pytest.raises(error, match=text):
            QueueSettings(backup=backup).checked(star, 4)
    with pytest.raises(ValueError, match="backup needs tokens"):
        QueueSettings(max_gap=None, backup=(0, 0, 1, 0)).checked(star, 4)


def test_a_backup_of_one_rank_speeds_up_that_rank_only():
    """Rank 0 is slow once: of its neighbors on the ring, the one with a backup does not wait."""
    times = np.ones((4, 6))
    times[0, 0] = 10
    ended = {}
    for backup in ((0, 1, 0, 0, 0, 0), 1, 0):
        result = simulate("hop", times, FREE, Settings(8, graph="ring", backup=backup))
        ended[backup] = result.waited
    waits = ended[0, 1, 0, 0, 0, 0]
    assert waits[1] < waits[5] == ended[0][5]
    assert ended[1][1] <= waits[1] and ended[1][5] < waits[5]


def test_the_command_line_has_gaps_backups_and_means_of_each_kind():
    assert HOP.given(["max_gap=auto", "backup=0+1+2", "mean=simple"]) == {
        "max_gap": "auto",
        "backup": (0, 1, 2),
        "mean": "simple",
    }
    assert HOP.given(["backup=1"]) == {"backup": 1}
    resolved = HOP.resolved(HOP.given(["backup=0+1+1+0", "staleness=4"]))
    assert HOP.problem(resolved, 4) is None
    assert "not one for each of 8 ranks" in HOP.problem(resolved, 8)
    assert HOP.check(resolved, 4) is None
    resolved["max_gap"] = 5
    assert HOP.check(resolved, 4).startswith("staleness 4 never makes a rank wait")
