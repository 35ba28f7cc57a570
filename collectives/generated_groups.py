"""Averages in groups made by Ripples' generator or its schedule, for numpy vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collectives import process
from collectives.agreement import by_value, name_ranks
from collectives.formed_groups import FormedGroupCollective, checked_idle_rank
from collectives.planned import Planned
from collectives.settings import LARGEST_SEED, checked_integer
from collectives.topology import STATIC_PERIOD, static_groups
from collectives.typing import Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["GeneratedGroupAllreduce"]

GROUPS = ("random", "buffered", "smart", "static")
# More ranks than any job has.
LARGEST_GROUP = 2**30


class GeneratedGroupAllreduce(FormedGroupCollective):
    """Averages each rank's vector in groups that a generator makes.

    A call returns when its groups have averaged, one after the other; groups of other ranks run at
    the same time. A rank that is in `average`, `synchronize`, `load` or `join`, or has closed, is
    in no group, and no call waits for it. If there is no rank to average with, a call returns at
    once.

    Unless groups are "static", a call may wait for another rank's next call. If that rank waits
    elsewhere for the caller, in a barrier or in another collective, both are delayed: for 8 times
    the usual time from one of its calls to the next and at least 1 s, or for `stall` seconds. Then
    the call continues without that rank, which is in no group until its next call. To avoid the
    delay, call `average` or `join` before, or close. For that reason a process can have only one
    such collective open at a time, besides those whose groups are "static".

    A static group waits for its ranks' calls of the same number, as an allreduce does: all ranks
    must call several such collectives, and others that wait, in the same order.

    Args:
        comm, like: those of `GroupAllreduce`.
        groups: "random": each call makes a group of random ranks and waits for it, after all groups
            with its rank that were made before. "buffered": a call waits for the oldest group with
            its rank; if there is none, it makes one of random ranks. "smart": as "buffered", but if
            there is no group, all ranks that are not waiting are divided into disjoint groups. On
            several nodes each rank is in two groups: first one rank of each node averages with
            those of other nodes, and the others in groups on their node; then all ranks of a node
            average. On a node with two ranks, the other rank is in the second group only.
            "static": in its t-th call a rank is in the group of iteration t of
            `topology.static_groups`.
        group_size: number of ranks in a group of "random" and "buffered", at least 2; all, if there
            are fewer.
            "smart" makes groups of 2 to `group_size` ranks, or 3, and of all ranks of a node.
        threshold: C_thres of "smart", at least 1: a division leaves out ranks that are this many
            calls behind the rank that asks for it, counted since all ranks last met.
        ranks_per_node: number of consecutive ranks that count as a node in "smart" and "static".
            None: nodes as MPI reports them, for "static" with equally many ranks on each.
        seed: seed of the groups drawn, an integer of at least 0.
        sync_every: number of a rank's calls from one average to the next, at least 1; the calls
            between return at once.
        controller_rank: the rank whose engine runs the generator; "static" has none.
        controller_only: whether that rank only runs the generator, as in `ReadyGroupAllreduce`.
        **options: see `CollectiveOptions`.

    Attributes:
        groups, group_size, threshold, controller_rank, controller_only: as given.
        ranks_per_node: as given, or as MPI reports it; None if nodes have different numbers of
            ranks.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.
        RuntimeError: a process has another such collective with a generator open; on all ranks.

    Source: Luo et al., Heterogeneity-Aware Asynchronous Decentralized Training (Ripples), 2019,
    sections 4 and 5.
    """

    _shown = ("groups", "group_size")

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        groups: str = "smart",
        group_size: int = 3,
        threshold: int = 4,
        ranks_per_node: int | None = None,
        seed: int = 0,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        **options: Unpack[CollectiveOptions],
    ):
        self.groups = groups
        self.group_size, self.threshold = group_size, threshold
        self.ranks_per_node, self.controller_rank = ranks_per_node, controller_rank
        self.controller_only = controller_only

        def plan() -> Planned:
            # Collective: all ranks reach this line, even with invalid arguments.
            nodes = nodes_of(comm)
            check(comm.size, groups, group_size, threshold, ranks_per_node, seed, controller_rank)
            if controller_only and groups == "static":
                raise ValueError("controller_only is True, but static groups need no controller")
            self._idle_rank = checked_idle_rank(controller_only, controller_rank, comm.size)
            if ranks_per_node is not None:
                nodes = [rank // ranks_per_node for rank in range(comm.size)]
            else:
                self.ranks_per_node = ranks_of_each(nodes)
            described = {
                "kind of groups": groups,
                "group_size": int(group_size),
                "threshold": int(threshold),
                "ranks_per_node": ranks_per_node,
                "seed": int(seed),
                "controller_rank": int(controller_rank),
                "controller_only": bool(controller_only),
            }
            if groups != "static":
                return described, generated(
                    comm.size,
                    int(group_size),
                    int(seed),
                    nodes if groups == "smart" else None,
                    int(threshold),
                    int(controller_rank),
                    self._idle_rank,
                    groups == "buffered",
                )
            if self.ranks_per_node is None:
                raise ValueError(
                    "groups is 'static', but the nodes have different numbers of consecutive "
                    f"ranks: {list_nodes(nodes)}; give ranks_per_node"
                )
            return described, scheduled(comm.size, int(self.ranks_per_node))

        super().__init__(comm, like, plan, sync_every=sync_every, **options)

    def _argument_error(self, comm: MPI.Intracomm, given: dict[str, Any]) -> Exception | None:
        """Return an error if the groups of another generator could wait for this one's."""
        if self.groups == "static" or not any(
            isinstance(other, GeneratedGroupAllreduce) and other.groups != "static"
            for other in process.opened()
        ):
            return None
        return RuntimeError(
            "another GeneratedGroupAllreduce with a generator is open in this process (Ripples has "
            "one): ranks that wait in one for the next calls of ranks that wait for theirs in the "
            "other would all wait; close() that one first, use groups='static', or average all "
            "vectors in one collective (of a list; with Ripples, of one module that has all models)"
        )

    @property
    def alone(self) -> int:
        """The number of this rank's calls that had no other rank to average with."""
        return self.native.queue.protocol.alone


def check(
    size: int,
    groups: str,
    group_size: int,
    threshold: int,
    ranks_per_node: int | None,
    seed: int,
    controller_rank: int,
) -> None:
    """Raise for arguments that are invalid for a job of `size` ranks."""
    if groups not in GROUPS:
        raise ValueError(f"groups is {groups!r}, not one of {', '.join(GROUPS)}")
    checked_integer("group_size", group_size, 2, largest=LARGEST_GROUP)
    checked_integer("threshold", threshold, 1)
    if ranks_per_node is not None:
        checked_integer("ranks_per_node", ranks_per_node, 1, largest=LARGEST_GROUP)
    checked_integer("seed", seed, 0, largest=LARGEST_SEED)
    checked_integer("controller_rank", controller_rank, 0, size - 1)


def generated(
    size: int,
    group_size: int,
    seed: int,
    nodes: list[int] | None,
    threshold: int,
    controller: int,
    absent: int | None = None,
    buffered: bool = False,
) -> Callable[..., Any]:
    """Return a function that makes a rank's protocol with a generator; smart groups need `nodes`.

    Ranks whose protocols the same function makes, as in simulations, share the generator.
    """
    from collectives.protocols.generated_groups import GeneratedGroupProtocol
    from collectives.protocols.group_generator import GroupGenerator

    generator = GroupGenerator(size, group_size, seed, nodes, threshold, absent, buffered)
    return lambda port, rank, size: GeneratedGroupProtocol(port, rank, size, generator, controller)


def scheduled(size: int, local_size: int) -> Callable[..., Any]:
    """Return a function that makes a rank's protocol with the static schedule."""
    from collectives.protocols.static_groups import StaticGroupProtocol

    own: list[list[tuple[int, ...]]] = [[()] * STATIC_PERIOD for _ in range(size)]
    for iteration in range(STATIC_PERIOD):
        for group in static_groups(size, local_size, iteration):
            for rank in group:
                own[rank][iteration] = group
    return lambda port, rank, size: StaticGroupProtocol(port, rank, size, own[rank])


def nodes_of(comm: MPI.Intracomm) -> list[int]:
    """Return the node of each rank, numbered in the order of their first ranks; collective."""
    node = process.place_of(comm).node(comm)
    try:
        firsts = comm.allgather(node.ranks[0])
    finally:
        node.free()
    numbers = {first: number for number, first in enumerate(sorted(set(firsts)))}
    return [numbers[first] for first in firsts]


def ranks_of_each(nodes: list[int]) -> int | None:
    """Return how many consecutive ranks each node has; None if the numbers differ.

    The last node may have fewer.
    """
    count = nodes.count(0)
    return count if all(node == rank // count for rank, node in enumerate(nodes)) else None


def list_nodes(nodes: list[int]) -> str:
    """Return "ranks 0-1; ranks 2-4"."""
    return "; ".join(name_ranks(ranks) for ranks in by_value(nodes).values())
