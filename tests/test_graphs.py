"""The graphs of ranks: their edges, names and weights."""

import re

import networkx
import numpy as np
import pytest

from collectives import graphs
from wagma.methods import METHODS

SIZES = range(1, 18)


def drawn(edges, size):
    """Return networkx's graph of some edges, which go in both directions."""
    assert graphs.is_symmetric(edges) and all(a != b for a, b in edges)
    graph = networkx.Graph(edges)
    graph.add_nodes_from(range(size))
    assert set(graph) == set(range(size)) and networkx.is_connected(graph)
    return graph


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_based_graph_joins_ranks_to_those_that_are_most_distant_on_the_ring(size):
    graph, ring = drawn(graphs.ring_based(size), size), drawn(graphs.ring(size), size)
    for rank in range(size):
        far = networkx.single_source_shortest_path_length(ring, rank)
        distant = {other for other in far if other != rank and far[other] == max(far.values())}
        assert set(graph[rank]) == set(ring[rank]) | distant
    if size > 4:
        assert {count for _, count in graph.degree} == {4 if size % 2 else 3}


@pytest.mark.parametrize("half", SIZES)
def test_a_double_ring_is_two_ring_based_graphs_joined_node_to_node(half):
    graph = drawn(graphs.double_ring(2 * half), 2 * half)
    one = drawn(graphs.ring_based(half), half)
    assert networkx.utils.graphs_equal(
        graph, networkx.convert_node_labels_to_integers(ladder(one), ordering="sorted")
    )
    with pytest.raises(ValueError, match=f"even number of ranks, not {2 * half + 1}"):
        graphs.double_ring(2 * half + 1)


def ladder(graph):
    """Return two of a graph, each node joined to its like; those of the first one come first."""
    return networkx.cartesian_product(networkx.complete_graph(2), graph)


MACHINES = [(1,), (4,), (3, 3), (1, 1, 1), (4, 2, 2), (2, 1, 5, 1), (4, 4, 4, 4)]


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("machines", MACHINES)
def test_machines_are_complete_and_joined_in_a_ring_by_their_gateways(machines, gateways):
    size = sum(machines)
    graph = drawn(graphs.hierarchical(machines, gateways), size)
    machine = np.repeat(np.arange(len(machines)), machines)
    for rank in range(size):
        within = np.flatnonzero(machine == machine[rank])
        assert set(within) - {rank} <= set(graph[rank])
    outside = [(a, b) for a, b in graph.edges if machine[a] != machine[b]]
    ring = graphs.ring(len(machines))
    met = {(int(machine[a]), int(machine[b])) for pair in outside for a, b in (pair, pair[::-1])}
    assert met == ring
    used = {rank for pair in outside for rank in pair}
    for number, ranks in enumerate(machines if len(machines) > 2 else ()):
        assert np.sum(machine[list(used)] == number) == min(gateways, ranks)
    name = f"hierarchical-{'+'.join(map(str, machines))}" + "-gateways-2" * (gateways == 2)
    assert graphs.edges_of(name, size) == graphs.hierarchical(machines, gateways)


@pytest.mark.parametrize(
    ("machines", "gateways", "message"),
    [((), 1, r"machines is \[\]"), ((4, 0), 1, "each at least 1"), ((4, 2), 3, "not 1 or 2")],
)
def test_machines_without_ranks_and_other_gateways_are_refused(machines, gateways, message):
    with pytest.raises(ValueError, match=message):
        graphs.hierarchical(machines, gateways)


def test_graphs_have_names():
    assert graphs.edges_of("ring", 5) == graphs.edges_of(None, 5) == graphs.ring(5)
    assert graphs.edges_of("ring-based", 9) == graphs.ring_based(9)
    assert graphs.edges_of("double-ring", 8) == graphs.double_ring(8)
    for name in graphs.NAMES:
        assert graphs.check_name(name) == name
        assert len(graphs.edges_of(name, 8)) >= 16
    for name in ("wheel", "Ring", "hierarchical-", "hierarchical-4+", "hierarchical-4-gateways-3"):
        with pytest.raises(ValueError, match=f"^graph must be ring, .*not {re.escape(repr(name))}"):
            graphs.edges_of(name, 4)
    with pytest.raises(ValueError, match="hierarchical-4.2 has 6 ranks, not 8"):
        graphs.edges_of("hierarchical-4+2", 8)
    with pytest.raises(ValueError, match="each at least 1"):
        graphs.edges_of("hierarchical-8+0", 8)


def test_methods_say_which_graphs_there_are_and_refuse_those_that_a_job_cannot_have():
    for method in filter(lambda method: method.option("graph"), METHODS.values()):
        option = method.option("graph")
        words = option.help.replace(",", "").split()
        assert {name for name in graphs.NAMES if "gateways" not in name} <= set(words)
        assert "-gateways-2" in words
        for name in graphs.NAMES:
            assert method.given([f"graph={name}"]) == {"graph": name}
            assert method.problem(method.resolved({"graph": name}), 8) is None
        problem = method.problem(method.resolved({"graph": "double-ring"}), 7)
        assert "an even number of ranks, not 7" in problem
        assert method.problem(method.resolved({}), 7) is None
        assert option.default is None or option.default in graphs.NAMES


def test_lists_of_neighbors_are_those_of_each_rank():
    edges = frozenset({(0, 1), (1, 2), (2, 0), (0, 2), (3, 0), (2, 3)})
    outgoing, incoming = graphs.neighbor_lists(edges, 4)
    assert outgoing == [graphs.destinations(edges, rank) for rank in range(4)]
    assert incoming == [graphs.sources(edges, rank) for rank in range(4)]


def test_equal_weights_leave_the_mean_as_it_is_on_regular_graphs_only():
    """And there Metropolis's weights are the same."""
    for size in SIZES:
        regular = [graphs.ring(size), graphs.ring_based(size)]
        regular += [] if size % 2 else [graphs.double_ring(size)]
        for edges in regular:
            matrix = graphs.uniform_matrix(edges, size)
            np.testing.assert_allclose(matrix, graphs.mixing_matrix(edges, size), atol=1e-12)
            assert graphs.unevenness(edges, size) is None
    one_way = graphs.edges_of(networkx.cycle_graph(5, networkx.DiGraph), 5)
    assert graphs.unevenness(one_way, 5) is None
    edges = graphs.hierarchical((4, 2, 2))
    matrix = graphs.uniform_matrix(edges, 8)
    np.testing.assert_allclose(matrix.sum(axis=0), 1)
    for rank in range(8):
        counted = {rank, *graphs.sources(edges, rank)}
        assert set(np.flatnonzero(matrix[:, rank])) == counted
        assert np.unique(matrix[list(counted), rank]).tolist() == [1 / len(counted)]
    counts = matrix.sum(axis=1)
    assert (counts.argmax(), counts.argmin()) == (0, 5)
    said = graphs.unevenness(edges, 8)
    # Rank 0 is among 6, 4, 4, 4 and the two gateways' 4; rank 5 among 2 and the gateway's 4.
    assert "rank 0 has 1.42" in said and "rank 5 has 0.75" in said


def test_spectral_gaps_are_those_of_the_paper():
    placed = [
        graphs.ring_based(8),
        graphs.hierarchical((4, 2, 2)),
        graphs.hierarchical((4, 2, 2), 2),
    ]
    gaps = [graphs.spectral_gap(edges, 8, self_loops=False) for edges in placed]
    np.testing.assert_allclose(gaps, [0.6667, 0.2682, 0.2688], atol=6e-5)
    assert graphs.spectral_gap(graphs.ring_based(8), 8) == pytest.approx(0.5)


def test_spectral_gaps_are_those_of_circles_and_of_ranks_that_all_meet():
    for size in range(2, 12):
        cosine = np.cos(2 * np.pi / size)
        circle = graphs.edges_of(networkx.cycle_graph(size, networkx.DiGraph), size)
        # Its eigenvalues without self-loops are the roots of unity.
        assert graphs.spectral_gap(circle, size, self_loops=False) == pytest.approx(1 - cosine)
        assert graphs.spectral_gap(circle, size) == pytest.approx((1 - cosine) / 2)
        everybody = graphs.hierarchical((size,))
        assert graphs.spectral_gap(everybody, size) == pytest.approx(1)
        if size > 2:
            ring = graphs.spectral_gap(graphs.ring(size), size)
            assert ring == pytest.approx(2 / 3 * (1 - cosine))
    with pytest.raises(ValueError, match="no spectral gap"):
        graphs.spectral_gap(graphs.ring(1), 1)
