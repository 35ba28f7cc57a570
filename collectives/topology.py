"""The groups of every version, and the tree along which its activation is sent.

All functions are pure functions of (rank, world size, group size, version), so that each rank
computes them without communication.

The groups are consecutive chunks of a list of all ranks, which is permuted at every version:
version ``t`` cuts ``σ^t`` into chunks of the group size. If the world size and the group size are
powers of two, σ rotates the bits of a rank, which gives exactly the XOR-shift groups of WAGMA-SGD
(section III-B, Algorithm 1); otherwise σ is the perfect shuffle of the chunks.

How the groups of a run mix the ranks' models is described by their mean `averaging_matrix`, and how
fast that spreads updates by its `rho`.

Arguments of the same name mean the same in all functions:

Args:
    rank: one of the ranks 0 to P − 1.
    world_size: number of ranks P, at least 1.
    group_size: largest number of ranks in a group S, 1 ≤ S ≤ P.
    version: number of the collective's call, from 0.
    position: a position in the permuted list, 0 to P − 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from collectives.agreement import counted

if TYPE_CHECKING:  # importing it takes time
    import numpy as np

__all__ = [
    "Shuffle",
    "activation_peers",
    "averaging_matrix",
    "averaging_matrix_of",
    "convergence_condition",
    "default_group_size",
    "group_of",
    "groups",
    "propagation_bound",
    "rho",
    "shuffle",
    "static_groups",
]

# Iterations after which the groups of `static_groups` are the same again.
STATIC_PERIOD = 4


@dataclass(frozen=True, eq=False)
class Shuffle:
    """The permutation σ in cycle form, and the chunks that its powers are cut into.

    Attributes:
        bounds: position at which each chunk begins, and the world size as the last entry.
        chunk: the chunk that contains each position.
        cycle: for each position, the cycle of σ that contains it.
        index: for each position, its index in that cycle.
    """

    bounds: tuple[int, ...]
    chunk: tuple[int, ...]
    cycle: tuple[tuple[int, ...], ...]
    index: tuple[int, ...]

    def rank_at(self, position: int, version: int) -> int:
        """Return σ^version(position), the rank at this position of the permuted list."""
        cycle = self.cycle[position]
        return cycle[(self.index[position] + version) % len(cycle)]

    def position_of(self, rank: int, version: int) -> int:
        """Return the position of this rank in the permuted list, the inverse of `rank_at`."""
        cycle = self.cycle[rank]
        return cycle[(self.index[rank] - version) % len(cycle)]

    def members(self, rank: int, version: int) -> list[int]:
        """Return the group of this rank, in the order of the list.

        Members whose positions differ in bit r only meet in phase r of recursive doubling: for
        powers of two these are the paper's pairs ``p XOR 2^((shift + r) mod log2 P)``.
        """
        chunk = self.chunk[self.position_of(rank, version)]
        positions = range(self.bounds[chunk], self.bounds[chunk + 1])
        return [self.rank_at(position, version) for position in positions]


@lru_cache(maxsize=64)
def shuffle(world_size: int, group_size: int, fixed: bool = False) -> Shuffle:
    """Return the permutation that makes the groups of this world size and group size.

    Args:
        fixed: whether every version has the first one's groups; σ is then the identity.

    Raises:
        ValueError: unless 1 ≤ group_size ≤ world_size.
    """
    if not 1 <= group_size <= world_size:
        raise ValueError(
            f"group size {group_size} is not between 1 and the world size {world_size}"
        )
    count = -(-world_size // group_size)
    small, larger = divmod(world_size, count)
    sizes = [small + (chunk < larger) for chunk in range(count)]
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    if fixed:
        sigma = list(range(world_size))
    elif _is_power_of_two(world_size) and _is_power_of_two(group_size):
        bits, turn = _log2_ceil(world_size), _log2_ceil(group_size)
        sigma = [_rotate_left(position, turn, bits) for position in range(world_size)]
    else:
        sigma = [
            bounds[chunk] + place
            for place in range(max(sizes))
            for chunk in range(count)
            if place < sizes[chunk]
        ]
    cycle: list[tuple[int, ...]] = [()] * world_size
    index = [0] * world_size
    for first in range(world_size):
        if cycle[first]:
            continue
        members = [first]
        while sigma[members[-1]] != first:
            members.append(sigma[members[-1]])
        for place, position in enumerate(members):
            index[position] = place
            cycle[position] = tuple(members) if place == 0 else cycle[first]
    chunks = tuple(chunk for chunk, size in enumerate(sizes) for _ in range(size))
    return Shuffle(tuple(bounds), chunks, tuple(cycle), tuple(index))


def groups(world_size: int, group_size: int, version: int) -> list[tuple[int, ...]]:
    """Return the disjoint groups of a version; together they contain every rank once.

    There are ⌈world_size / group_size⌉ groups, and their sizes differ by at most one. For
    1 < group_size < world_size they change with every version, and an update made by one rank
    reaches all ranks within `propagation_bound` versions, whichever version it starts from.

    Returns:
        The groups in ascending order of their smallest rank, each a sorted tuple of ranks.

    Raises:
        ValueError: if an argument is out of range.

    Source: WAGMA-SGD, Algorithm 1, for powers of two; other sizes go beyond the paper.
    """
    _check_version(version)
    sigma = shuffle(world_size, group_size)
    order = [sigma.rank_at(position, version) for position in range(world_size)]
    cut = zip(sigma.bounds, sigma.bounds[1:], strict=False)
    return sorted(tuple(sorted(order[begin:end])) for begin, end in cut)


def default_group_size(world_size: int) -> int:
    """Return √P rounded up to a power of two, at most P: WAGMA-SGD's choice of S (section V-B)."""
    return min(world_size, 1 << (_log2_ceil(world_size) + 1) // 2)


def group_of(rank: int, world_size: int, group_size: int, version: int) -> tuple[int, ...]:
    """Return the one group of `groups` that contains this rank, without computing the others.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check_rank(rank, world_size)
    _check_version(version)
    return tuple(sorted(shuffle(world_size, group_size).members(rank, version)))


def activation_peers(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the ranks to which a rank sends activations, and from which it receives them.

    Returns:
        One pair (destination, source) of ranks for each dimension k = 0 … ⌈log2 P⌉ − 1. For a power
        of two both are ``rank XOR 2^k``, the butterfly that overlays one binomial tree rooted at
        every rank; otherwise they are the ranks at distance 2^k after and before this one.

    Raises:
        ValueError: the rank is not one of the world's.

    Source: WAGMA-SGD, section III-A1 and Figure 1.
    """
    _check_rank(rank, world_size)
    steps = [1 << k for k in range(_log2_ceil(world_size))]
    if _is_power_of_two(world_size):
        return [(rank ^ step, rank ^ step) for step in steps]
    return [((rank + step) % world_size, (rank - step) % world_size) for step in steps]


def propagation_bound(world_size: int, group_size: int) -> int:
    """Return the number of versions within which an update reaches every rank: 2⌈log_S P⌉ + 1.

    The engines of two ranks are never further apart than this number of versions. (For powers of
    two ⌈log_S P⌉ versions suffice to spread an update.) For group_size = 1 no update spreads.

    Raises:
        ValueError: unless 1 < group_size ≤ world_size.
    """
    if not 1 < group_size <= world_size:
        raise ValueError(
            f"group size {group_size} does not spread updates over {counted(world_size, 'rank')}"
        )
    rounds, reached = 0, 1
    while reached < world_size:
        reached *= group_size
        rounds += 1
    return 2 * rounds + 1


def averaging_matrix(groups: Iterable[Sequence[int]], world_size: int) -> np.ndarray:
    """Return the mean of the averaging matrices of groups that have averaged one after the other.

    The matrix of a group S has 1/|S| for each pair of its members, including a member with itself,
    and 1 on the diagonal for every other rank.

    Args:
        groups: the ranks of each group, without repetition.
        world_size: number of ranks N.

    Returns:
        Symmetric float64 array of shape (N, N), whose rows and columns sum to 1.

    Raises:
        ValueError: there is no group, or a group is empty, repeats a rank, or has an invalid one.

    Source: Partial Reduce (Miao et al., 2021), equation 4.
    """
    import numpy as np

    total, count = np.zeros((world_size, world_size)), 0
    for group in groups:
        for rank in group:
            _check_rank(rank, world_size)
        members = list(group)
        if not members or len(set(members)) < len(members):
            raise ValueError(f"{members} is not a group of ranks")
        total[np.ix_(members, members)] += 1 / len(members)
        total[members, members] -= 1
        count += 1
    if not count:
        raise ValueError("groups is empty")
    return np.eye(world_size) + total / count


def averaging_matrix_of(met: np.ndarray) -> np.ndarray | None:
    """Return the `averaging_matrix` of a run, computed from the ranks' `met`.

    Args:
        met: float64 array of shape (N, N), one row per rank, its `FormedGroupCollective.met`.

    Returns:
        float64 array of shape (N, N); None without groups.
    """
    import numpy as np

    met = np.asarray(met, np.float64)
    groups = np.trace(met)  # 1/|S| from each member of a group
    if groups == 0:
        return None
    return np.eye(len(met)) + (met - np.diag(np.rint(met.sum(axis=1)))) / groups


def rho(matrix: np.ndarray) -> float:
    """Return ρ, the largest absolute eigenvalue of an averaging matrix except one that is 1.

    The smaller it is, the faster updates spread; 1: some ranks never meet the others.

    Args:
        matrix: mean `averaging_matrix` of a run, symmetric float64 array of shape (N, N).

    Returns:
        max(|λ2|, |λN|), from 0 to 1; 0 for one rank.

    Raises:
        ValueError: the matrix is not symmetric, or its rows do not sum to 1.

    Source: Partial Reduce (Miao et al., 2021), equation 6, for groups with equal weights.
    """
    import numpy as np

    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"the matrix has the shape {matrix.shape}, not (N, N)")
    if not np.allclose(matrix, matrix.T, rtol=0, atol=1e-9):
        raise ValueError("the matrix is not symmetric")
    if not np.allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-9):
        raise ValueError("a row of the matrix does not sum to 1")
    others = np.linalg.eigvalsh(matrix)[:-1]
    return min(float(np.abs(others).max(initial=0)), 1.0)


def convergence_condition(
    learning_rate: float, lipschitz: float, rho: float, world_size: int, group_size: int
) -> float:
    """Return the left side of the condition of Theorem 1, under which Partial Reduce converges.

    It converges if this is at most 1, all ranks start from the same model, and all members of a
    group have equal weights.

    Args:
        learning_rate: γ, by which a rank multiplies its gradient.
        lipschitz: L, the Lipschitz constant of the gradient of the loss.
        rho: ρ of the mean `averaging_matrix`, see `rho`.
        world_size: number of ranks N.
        group_size: number of ranks P' that average.

    Returns:
        η L + 2 N³ η² L² ρ̄ / P'², where η = P' γ / N and ρ̄ = ρ/(1 − ρ) + 2√ρ/(1 − √ρ)²; infinity
        if ρ is 1.

    Raises:
        ValueError: an argument is out of range.

    Source: Partial Reduce (Miao et al., 2021), Theorem 1. Its equation 7 lacks the L² that equation
    8 and the units require, and has ρ/N for the P'/N of η.
    """
    if not 0 <= rho <= 1:
        raise ValueError(f"rho is {rho}, not between 0 and 1")
    if not (learning_rate >= 0 and lipschitz >= 0):
        raise ValueError(
            f"learning_rate and lipschitz must be at least 0, not {learning_rate} and {lipschitz}"
        )
    if not 1 <= group_size <= world_size:
        raise ValueError(
            f"group size {group_size} is not between 1 and the world size {world_size}"
        )
    if rho == 1:
        return math.inf
    eta = group_size * learning_rate / world_size
    root = math.sqrt(rho)
    rho_bar = rho / (1 - rho) + 2 * root / (1 - root) ** 2
    network = 2 * world_size**3 * (eta * lipschitz) ** 2 * rho_bar / group_size**2
    return eta * lipschitz + network


def static_groups(world_size: int, local_size: int, iteration: int) -> list[tuple[int, ...]]:
    """Return the disjoint groups of an iteration in Ripples' static schedule.

    A node has `local_size` consecutive ranks; the last has fewer if these do not divide the world
    size. The schedule repeats after four iterations:

    0. The first ranks of all nodes average; on each node the third and the fourth do, and so on in
       pairs.
    1. All ranks of a node average.
    2. On each node the first and the last average. The second averages with that of the opposite
       node, half of the nodes further on. The ranks in between average in pairs, from the third on.
    3. As 1.

    With four ranks on each of an even number of nodes this is the paper's schedule. Otherwise: if
    the number of nodes is odd, the last one has no opposite. On a node with two ranks the second
    averages with the opposite node's, and the first with no rank. A node's only rank is its second
    as well. The groups of a period connect all ranks.

    Args:
        world_size: number of ranks P, at least 1.
        local_size: number of ranks of a node, at least 1.
        iteration: from 0.

    Returns:
        The groups in ascending order of their smallest rank, each a sorted tuple of at least two
        ranks; a rank without a partner is in none.

    Raises:
        ValueError: if an argument is out of range.

    Source: Luo et al., Ripples, Figures 9 and 10 (section 4.2).
    """
    if world_size < 1 or local_size < 1:
        raise ValueError(
            f"world_size and local_size must be 1 or more, not {world_size} and {local_size}"
        )
    if iteration < 0:
        raise ValueError(f"iteration {iteration} is negative")
    ranks = range(world_size)
    nodes = [ranks[first : first + local_size] for first in ranks[::local_size]]
    phase = iteration % STATIC_PERIOD
    found: list[Any]
    if phase == 0:
        found = [[node[0] for node in nodes]] + [
            pair for node in nodes for pair in _pairs(node[2:])
        ]
    elif phase == 2:
        half = len(nodes) // 2
        bridges = [node[min(1, len(node) - 1)] for node in nodes]
        found = [[bridges[i], bridges[half + i]] for i in range(half)]
        found += [[node[0], node[-1]] for node in nodes if len(node) > 2]
        found += [pair for node in nodes for pair in _pairs(node[2:-1])]
    else:
        found = nodes
    return sorted(tuple(group) for group in found if len(group) > 1)


def _pairs(ranks: range) -> list[range]:
    """Return pairs of consecutive ranks, without the last of an odd number."""
    return [ranks[i : i + 2] for i in range(0, len(ranks) - 1, 2)]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _log2_ceil(number: int) -> int:
    return (number - 1).bit_length()


def _rotate_left(number: int, turn: int, bits: int) -> int:
    if bits == 0:
        return number
    turn %= bits
    return ((number << turn) | (number >> (bits - turn))) & ((1 << bits) - 1)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {counted(world_size, 'rank')}")


def _check_version(version: int) -> None:
    if version < 0:
        raise ValueError(f"version {version} is negative")
