"""Graphs of the ranks, and the weights of the ranks' vectors on them.

A graph is a set of edges (source, destination) between the ranks 0 to P − 1. Users give a name of
`NAMES`, or a networkx graph, undirected or directed; networkx is required for these only.

Arguments of the same name mean the same in all functions:

Args:
    edges: frozenset of (source, destination), as the functions here return them.
    size: number of ranks P.
    rank: one of the ranks 0 to P − 1.
    self_loops: whether a rank's own vector is among those that it averages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from collectives.agreement import counted

if TYPE_CHECKING:  # networkx need not be installed
    import networkx
    import numpy.typing as npt

__all__ = [
    "NAMES",
    "check_mixing",
    "check_name",
    "destinations",
    "double_ring",
    "edges_of",
    "exponential_phases",
    "hierarchical",
    "is_symmetric",
    "longest_way_back",
    "mixing_matrix",
    "neighbor_lists",
    "ring",
    "ring_based",
    "sources",
    "spectral_gap",
    "unevenness",
    "uniform_matrix",
]

Edges = frozenset[tuple[int, int]]


def ring(size: int) -> Edges:
    """Return the edges of the ring of all ranks, in both directions."""
    return _both_ways((rank, (rank + 1) % size) for rank in range(size))


def ring_based(size: int) -> Edges:
    """Return the ring's edges, and those between each rank and the most distant one on it.

    With an odd number of ranks there are two most distant ones, at a distance of (P − 1) / 2.

    Source: Luo et al., Hop, 2019, Figure 11.
    """
    return ring(size) | _both_ways((rank, (rank + size // 2) % size) for rank in range(size))


def double_ring(size: int) -> Edges:
    """Return the edges of two `ring_based` graphs, joined rank to rank.

    Raises:
        ValueError: an odd number of ranks.

    Source: Luo et al., Hop, 2019, Figure 11.
    """
    if size % 2:
        raise ValueError(f"a double ring needs an even number of ranks, not {size}")
    half = size // 2
    one = ring_based(half)
    other = {(a + half, b + half) for a, b in one}
    return one | other | _both_ways((rank, rank + half) for rank in range(half))


def hierarchical(machines: Sequence[int], gateways: int = 1) -> Edges:
    """Return edges between all ranks of a machine, and those of a ring of the machines.

    Args:
        machines: number of ranks on each machine, at least 1; ranks are numbered machine by
            machine.
        gateways: 1: the first rank of a machine has the edges to both neighbors in the ring. 2: the
            first rank has the edge to the previous machine, the second the edge to the next.

    Raises:
        ValueError: no machine, one without a rank, or another number of gateways.

    Source: Luo et al., Hop, 2019, section 7.3.6 and Figure 21.
    """
    if not machines or min(machines) < 1:
        raise ValueError(
            f"machines is {list(machines)}, but must be numbers of ranks, each at least 1"
        )
    if gateways not in (1, 2):
        raise ValueError(f"gateways is {gateways!r}, not 1 or 2")
    firsts = [sum(machines[:number]) for number in range(len(machines))]
    within: list[tuple[int, int]] = []
    between: list[tuple[int, int]] = []
    for number, (first, ranks) in enumerate(zip(firsts, machines)):
        within += combinations(range(first, first + ranks), 2)
        last = first + min(gateways, ranks) - 1
        between.append((last, firsts[(number + 1) % len(machines)]))
    return _both_ways([*within, *(between if len(machines) > 1 else [])])


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Edges:
    pairs = {(a, b) for a, b in pairs if a != b}
    return frozenset(pairs | {(b, a) for a, b in pairs})


# The names of graphs: those for any number of ranks, and the pattern of those that list machines.
SIZED = {"ring": ring, "ring-based": ring_based, "double-ring": double_ring}
OF_MACHINES = re.compile(r"hierarchical-([0-9]+(?:\+[0-9]+)*)(?:-gateways-([12]))?")
NAMES = (*SIZED, "hierarchical-4+2+2", "hierarchical-4+2+2-gateways-2")


def check_name(name: str) -> str:
    """Return `name` if it is the name of a graph, for some number of ranks.

    Raises:
        ValueError: there is no such graph.
    """
    if name not in SIZED and not OF_MACHINES.fullmatch(name):
        raise ValueError(
            f"must be {', '.join(SIZED)} or hierarchical-A+B+…, for machines with A, B, … ranks, "
            f"optionally followed by -gateways-2, not {name!r}"
        )
    return name


def _edges_by_name(name: str, size: int) -> Edges:
    try:
        check_name(name)
    except ValueError as error:
        raise ValueError(f"graph {error}") from None
    if name in SIZED:
        return SIZED[name](size)
    found = OF_MACHINES.fullmatch(name)
    assert found  # checked by `check_name`
    listed, gateways = found.groups()
    machines = [int(ranks) for ranks in listed.split("+")]
    if sum(machines) != size:
        raise ValueError(f"graph {name} has {counted(sum(machines), 'rank')}, not {size}")
    return hierarchical(machines, int(gateways or 1))


def edges_of(graph: networkx.Graph | str | None, size: int) -> Edges:
    """Return the edges of a graph, without those from a rank to itself.

    Args:
        graph: `networkx.Graph` or `networkx.DiGraph` of the ranks; a name like those of `NAMES`,
            with any numbers of ranks on machines; None: the ring.

    Raises:
        TypeError, ValueError: it is no such graph, has other nodes, or is not (strongly) connected.
    """
    if graph is None:
        return ring(size)
    if isinstance(graph, str):
        return _edges_by_name(graph, size)
    import networkx

    if not isinstance(graph, networkx.Graph):  # a DiGraph is one
        raise TypeError(f"graph is a {type(graph).__name__}, not a networkx graph or a name")
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


def longest_way_back(edges: Edges, size: int) -> int:
    """Return the largest distance from b back to a, over all edges (a, b).

    It is 1 if every edge goes in both directions, or there are none.
    """
    if is_symmetric(edges):
        return 1
    outgoing, incoming = neighbor_lists(edges, size)
    longest = 1
    for rank in range(size):
        far, reached, near = 0, {rank}, [rank]
        while not reached.issuperset(incoming[rank]):
            near = [peer for peer in {b for a in near for b in outgoing[a]} if peer not in reached]
            reached.update(near)
            far += 1
        longest = max(longest, far)
    return longest


def destinations(edges: Edges, rank: int) -> list[int]:
    """Return the ranks that a rank has edges to, sorted."""
    return sorted(b for a, b in edges if a == rank)


def sources(edges: Edges, rank: int) -> list[int]:
    """Return the ranks that a rank has edges from, sorted."""
    return sorted(a for a, b in edges if b == rank)


def neighbor_lists(edges: Edges, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return `destinations` and `sources` of all ranks, in one pass through the edges."""
    outgoing: list[list[int]] = [[] for _ in range(size)]
    incoming: list[list[int]] = [[] for _ in range(size)]
    for a, b in sorted(edges):
        outgoing[a].append(b)
        incoming[b].append(a)
    return outgoing, incoming


def uniform_matrix(edges: Edges, size: int, *, self_loops: bool = True) -> np.ndarray:
    """Return equal weights for all vectors that a rank averages.

    Returns:
        float64 array W of shape (size, size): W[j, i] is the weight of rank j's vector at rank i, 1
        / |N_in(i)| for all edges from j to i.

    Source: Luo et al., Hop, 2019, equation 1.
    """
    matrix = np.eye(size) if self_loops or size == 1 else np.zeros((size, size))
    for a, b in edges:
        matrix[a, b] = 1
    return matrix / matrix.sum(axis=0)


def unevenness(edges: Edges, size: int) -> str | None:
    """Return a sentence about the largest and smallest total weight in `uniform_matrix`.

    None if all ranks have the same: W is then doubly stochastic, and averages do not change the
    mean of all vectors.
    """
    weights = np.array([1 / (1 + len(incoming)) for incoming in neighbor_lists(edges, size)[1]])
    counts = weights.copy()
    for a, b in edges:
        counts[a] += weights[b]
    if np.abs(counts - 1).max() < 1e-9:
        return None
    most, least = counts.argmax(), counts.argmin()
    return (
        f"ranks have unequal weights: rank {most} has {counts[most]:.2f} in total, rank {least} "
        f"has {counts[least]:.2f}"
    )


def spectral_gap(edges: Edges, size: int, *, self_loops: bool = True) -> float:
    """Return 1 − λ₂ of `uniform_matrix`: the larger, the faster information spreads.

    λ₂ is the matrix's eigenvalue with the second largest real part. The paper defines it by
    absolute values, but its figures are those by real parts, without self-loops; by absolute values
    the gap of every bipartite graph without self-loops is 0.

    Raises:
        ValueError: a single rank.

    Source: Luo et al., Hop, 2019, section 7.3.6.
    """
    if size < 2:
        raise ValueError("a graph of a single rank has no spectral gap")
    values = np.linalg.eigvals(uniform_matrix(edges, size, self_loops=self_loops))
    return float(1 - np.sort(values.real)[-2])


def mixing_matrix(edges: Edges, size: int) -> np.ndarray:
    """Return doubly stochastic weights for the edges: float64 array W of shape (size, size).

    W[j, i] is the weight of rank j's vector at rank i. If all edges go in both directions, these
    are Metropolis's weights, 1 / (1 + the larger of both degrees); for a directed graph in which
    all ranks have the same number d of edges in and out, 1 / (1 + d). On the ring all are 1/3.

    Raises:
        ValueError: another directed graph, for which weights must be given.
    """
    lists = neighbor_lists(edges, size)
    outgoing, incoming = ([len(peers) for peers in of_ranks] for of_ranks in lists)
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


def check_mixing(matrix: npt.ArrayLike, edges: Edges, size: int) -> np.ndarray:
    """Return a mixing matrix as float64, checked against its graph.

    Args:
        matrix: array of shape (size, size), of any dtype of real numbers: see `mixing_matrix`.

    Raises:
        TypeError, ValueError: it has another shape, an entry that is negative, not finite or on no
            edge, a column that does not sum to 1 (the averages would drift), or such a row (some
            ranks would have more weight than others).
    """
    try:
        matrix = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"mixing is not a numeric matrix: {error}") from None
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

    In each phase every rank sends to `neighbors` others; their distances are the powers of two
    below P, in turn.

    Args:
        neighbors: number of ranks that each rank sends to in a phase, at most ⌈log2 P⌉.

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
            f"below {counted(size, 'rank')}"
        )
    phases: list[Edges] = []
    first = 0
    while not phases or first % len(hops):
        chosen = [hops[(first + j) % len(hops)] for j in range(neighbors)]
        phases.append(
            frozenset((rank, (rank + hop) % size) for rank in range(size) for hop in chosen)
        )
        first += neighbors
    return phases
