"""Who sends to whom in the methods that have a graph, and how much each rank's vector counts.

A graph is a set of edges (source, destination) between the ranks 0 to P − 1. Users give networkx
graphs, undirected or directed; only they need to have networkx.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "check_mixing",
    "destinations",
    "edges_of",
    "exponential_phases",
    "is_symmetric",
    "mixing_matrix",
    "ring",
    "sources",
]

Edges = frozenset[tuple[int, int]]


def ring(size: int) -> Edges:
    """Return the edges of the ring of all ranks, in both directions."""
    pairs = {(rank, (rank + 1) % size) for rank in range(size)} - {(0, 0)}
    return frozenset(pairs | {(b, a) for a, b in pairs})


def edges_of(graph, size: int) -> Edges:
    """Return the edges of a networkx graph, without those from a rank to itself.

    Args:
        graph: `networkx.Graph` or `networkx.DiGraph` of the ranks; None: the ring.
        size: number of ranks P.

    Raises:
        TypeError, ValueError: it is no such graph, has other nodes, or is not (strongly) connected.
    """
    if graph is None:
        return ring(size)
    import networkx

    if not isinstance(graph, networkx.Graph):  # a DiGraph is one
        raise TypeError(f"graph is a {type(graph).__name__}, not a networkx graph")
    if set(graph.nodes) != set(range(size)):
        raise ValueError(
            f"graph has the nodes {sorted(graph.nodes, key=str)}, not the ranks 0 to {size - 1}"
        )
    directed = graph.to_directed()
    if not networkx.is_strongly_connected(directed):
        parts = [sorted(part) for part in networkx.strongly_connected_components(directed)]
        raise ValueError(
            f"graph does not connect all ranks with each other, but only {sorted(parts)}"
        )
    return frozenset((int(a), int(b)) for a, b in directed.edges() if a != b)


def is_symmetric(edges: Edges) -> bool:
    """Return whether every edge goes in both directions."""
    return all((b, a) in edges for a, b in edges)


def destinations(edges: Edges, rank: int) -> list[int]:
    """Return the ranks that a rank has edges to, sorted."""
    return sorted(b for a, b in edges if a == rank)


def sources(edges: Edges, rank: int) -> list[int]:
    """Return the ranks that a rank has edges from, sorted."""
    return sorted(a for a, b in edges if b == rank)


def mixing_matrix(edges: Edges, size: int) -> np.ndarray:
    """Return doubly stochastic weights for the edges: float64 array W of shape (size, size).

    W[j, i] is how much rank j's vector counts at rank i. For edges in both directions they are
    Metropolis's, 1 / (1 + the larger of both degrees), and for a directed graph whose ranks all
    have the same number d of edges in and out 1 / (1 + d); on the ring that is 1/3 each.

    Raises:
        ValueError: another directed graph, for which weights must be given.
    """
    incoming = [len(sources(edges, rank)) for rank in range(size)]
    outgoing = [len(destinations(edges, rank)) for rank in range(size)]
    if not is_symmetric(edges) and len({*incoming, *outgoing}) > 1:
        raise ValueError(
            "the graph is directed and its ranks have different numbers of edges: pass a doubly "
            "stochastic mixing matrix for it, or use push-sum"
        )
    matrix = np.zeros((size, size))
    for a, b in edges:
        matrix[a, b] = 1 / (1 + max(incoming[a], incoming[b]))
    matrix[np.diag_indices(size)] = 1 - matrix.sum(axis=0)
    return matrix


def check_mixing(matrix, edges: Edges, size: int) -> np.ndarray:
    """Return a mixing matrix as float64, checked against its graph.

    Raises:
        TypeError, ValueError: it has another shape, an entry that is negative, not finite or on no
            edge, a column that does not sum to 1 (the averages would drift), or a row (some ranks
            would count more than others).
    """
    try:
        matrix = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"mixing is no matrix of numbers: {error}") from None
    if matrix.shape != (size, size):
        raise ValueError(f"mixing has the shape {matrix.shape}, not ({size}, {size})")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError("mixing has entries that are negative or not finite")
    for a, b in zip(*np.nonzero(matrix)):
        if a != b and (a, b) not in edges:
            raise ValueError(f"mixing[{a}, {b}] is {matrix[a, b]:g}, but the graph has no edge")
    for name, axis in (("column", 0), ("row", 1)):
        sums = matrix.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > 1e-9:
            raise ValueError(f"{name} {worst} of mixing sums to {sums[worst]:.12g}, not to 1")
    return matrix


def exponential_phases(size: int, neighbors: int) -> list[Edges]:
    """Return the directed exponential graph, phase by phase.

    In each phase every rank sends to `neighbors` others, whose distances are powers of two below
    P and go through all of these in turn.

    Args:
        size: number of ranks P.
        neighbors: ranks that each rank sends to in a phase, at most ⌈log2 P⌉.

    Raises:
        ValueError: more neighbors than there are powers of two.

    Source: Assran et al., Stochastic Gradient Push, 2019, appendix A.
    """
    hops = [1 << i for i in range((size - 1).bit_length())]
    if not hops:
        return [frozenset()]
    if not 1 <= neighbors <= len(hops):
        raise ValueError(
            f"neighbors is {neighbors}, not between 1 and {len(hops)}, the number of powers of two "
            f"below the {size} ranks"
        )
    phases, first = [], 0
    while not phases or first % len(hops):
        chosen = [hops[(first + j) % len(hops)] for j in range(neighbors)]
        phases.append(
            frozenset((rank, (rank + hop) % size) for rank in range(size) for hop in chosen)
        )
        first += neighbors
    return phases
