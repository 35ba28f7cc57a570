"""The average of groups that Ripples' generator, or its schedule, makes, for numpy vectors."""

from __future__ import annotations

from collectives.agreement import by_value, name_ranks
from collectives.formed_groups import FormedGroupCollective, checked_idle_rank
from collectives.node import Node
from collectives.settings import checked_integer
from collectives.topology import STATIC_PERIOD, static_groups

__all__ = ["GeneratedGroupAllreduce"]

GROUPS = ("random", "smart", "static")


class GeneratedGroupAllreduce(FormedGroupCollective):
    """Averages each rank's vector with those of a few others, whom a group generator chooses.

    A call returns once the groups of its have averaged, one after the other; other ranks' groups
    are under way at the same time. A rank that is in `average`, `synchronize`, `load` or `join`, or
    has closed, is not waited for, and is in no group. One for which there is nobody goes on alone.

    Where groups are not "static" a call may wait for another rank's next one. A rank that waits
    elsewhere meanwhile, in a barrier or in another collective, for one whose call waits for it,
    holds both up for `stall` seconds; then the call goes on without what that rank would give. Call
    `average` or `join` first, or close.

    Args:
        comm, like: those of `GroupAllreduce`.
        groups: "random": each call makes a group of random ranks and waits for it, and before for
            all groups made earlier that its rank is in. "smart": a call waits for the oldest group
            that its rank was put into; if there is none, all ranks that wait for nobody are put
            into disjoint groups. On several nodes they are put into two each: first one rank of
            each node averages with other nodes', then all of a node average. "static": in its t-th
            call a rank averages with those that `topology.static_groups` says of iteration t.
        group_size: how many ranks a group of "random" has, 2 or more; all, if there are fewer.
            "smart" makes groups of two up to so many, or three, and of all of a node.
        threshold: C_thres of "smart", 1 or more: ranks that have made so many calls fewer than the
            one for which groups are made, since all have last met, are in none of these.
        ranks_per_node: how many ranks that follow one another count as a node in "smart" and
            "static". None: nodes are as MPI has them, for "static" with equally many ranks on each.
        seed: of the groups drawn; an integer, from 0 on.
        sync_every: in every so-manieth call a rank averages, from 1 on; others return at once.
        controller_rank: the rank whose engine generates the groups of "random" and "smart".
        controller_only: whether that rank does nothing else, as of `ReadyGroupAllreduce`.
        engine, transport, stall, abort, log_level: those of `GroupAllreduce`.

    Attributes:
        groups, group_size, threshold, controller_rank, controller_only: as given.
        ranks_per_node: as given, or as MPI has it; None if nodes have different numbers of ranks.

    Raises:
        TypeError, ValueError: on every rank alike, for what is wrong on any of them or differs.

    Source: Luo et al., Heterogeneity-Aware Asynchronous Decentralized Training (Ripples), 2019,
    sections 4 and 5.
    """

    _shown = ("groups", "group_size")

    def __init__(
        self,
        comm,
        like,
        *,
        groups="smart",
        group_size=3,
        threshold=4,
        ranks_per_node=None,
        seed=0,
        sync_every=1,
        controller_rank=0,
        controller_only=False,
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        self.groups = groups
        self.group_size, self.threshold = group_size, threshold
        self.ranks_per_node, self.controller_rank = ranks_per_node, controller_rank
        self.controller_only = controller_only

        def plan():
            # All ranks of the job come here, whatever is wrong with their arguments.
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
                )
            if self.ranks_per_node is None:
                raise ValueError(
                    "groups is 'static', but nodes do not have equally many ranks that follow one "
                    f"another: {list_nodes(nodes)}; give ranks_per_node"
                )
            return described, scheduled(comm.size, int(self.ranks_per_node))

        super().__init__(
            comm,
            like,
            plan,
            sync_every=sync_every,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    @property
    def alone(self) -> int:
        """How many of this rank's calls were in no group of several ranks."""
        return self.native.queue.protocol.alone


def check(size, groups, group_size, threshold, ranks_per_node, seed, controller_rank) -> None:
    """Raise what is wrong with the arguments for so many ranks."""
    if groups not in GROUPS:
        raise ValueError(f"groups is {groups!r}, not one of {', '.join(GROUPS)}")
    lowest = {"group_size": 2, "threshold": 1, "ranks_per_node": 1, "seed": 0, "controller_rank": 0}
    given = (group_size, threshold, ranks_per_node, seed, controller_rank)
    for (name, least), value in zip(lowest.items(), given, strict=True):
        if name == "ranks_per_node" and value is None:
            continue
        checked_integer(name, value, least)
    checked_integer("controller_rank", controller_rank, 0, size - 1)


def generated(size, group_size, seed, nodes, threshold, controller, absent=None):
    """Return what makes a rank's protocol, with a generator; for smart groups the ranks' nodes.

    Ranks that are made by the same one, as in simulations, have the generator in common.
    """
    from collectives.protocols.generated_groups import GeneratedGroupProtocol
    from collectives.protocols.group_generator import GroupGenerator

    generator = GroupGenerator(size, group_size, seed, nodes, threshold, absent)
    return lambda *rank: GeneratedGroupProtocol(*rank, generator, controller)


def scheduled(size, local_size):
    """Return what makes a rank's protocol, with the static schedule."""
    from collectives.protocols.static_groups import StaticGroupProtocol

    own = [[()] * STATIC_PERIOD for _ in range(size)]
    for iteration in range(STATIC_PERIOD):
        for group in static_groups(size, local_size, iteration):
            for rank in group:
                own[rank][iteration] = group
    return lambda port, rank, size: StaticGroupProtocol(port, rank, size, own[rank])


def nodes_of(comm) -> list[int]:
    """Return the node of each rank, numbered in the order of first ranks; collective."""
    node = Node(comm)
    try:
        firsts = comm.allgather(node.ranks[0])
    finally:
        node.free()
    numbers = {first: number for number, first in enumerate(sorted(set(firsts)))}
    return [numbers[first] for first in firsts]


def ranks_of_each(nodes: list[int]) -> int | None:
    """Return how many ranks follow one another on each node; None if not equally many do.

    The last may have fewer.
    """
    count = nodes.count(0)
    return count if all(node == rank // count for rank, node in enumerate(nodes)) else None


def list_nodes(nodes: list[int]) -> str:
    """Return "ranks 0-1; ranks 2-4"."""
    return "; ".join(name_ranks(ranks) for ranks in by_value(nodes).values())
