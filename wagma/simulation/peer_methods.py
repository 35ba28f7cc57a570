"""The ranks of each method whose ranks send each other vectors, with their protocols."""

from __future__ import annotations

from typing import Any

from collectives import graphs
from collectives.protocols.neighbor_average import NeighborAverageProtocol
from collectives.protocols.pairwise_average import PairwiseAverageProtocol
from collectives.protocols.parameter_server import ParameterServerProtocol
from collectives.protocols.push_sum import PushSumProtocol
from collectives.protocols.queued_neighbor_average import QueuedNeighborAverageProtocol
from collectives.queue_settings import QueueSettings
from wagma.simulation.methods import Settings
from wagma.simulation.peers import PeerMethod

__all__ = ["ad_psgd", "d_psgd", "hop", "parameter_server", "sgp"]


def d_psgd(settings: Settings, ranks: int) -> PeerMethod:
    """Return D-PSGD's ranks."""
    destinations, sources = graphs.neighbor_lists(graphs.edges_of(settings.graph, ranks), ranks)
    everybody = settings.clock == "global"

    def make(port: Any, rank: int, size: int) -> Any:
        share = 1 / (1 + len(sources[rank]))
        shares = [share] * len(sources[rank])
        return NeighborAverageProtocol(
            port, rank, size, sources[rank], shares, share, destinations[rank], everybody
        )

    return PeerMethod(make, settings.nbytes)


def hop(settings: Settings, ranks: int) -> PeerMethod:
    """Return Hop's ranks.

    Raises:
        ValueError: an option is out of range, or cannot be combined with the others.
    """
    edges = graphs.edges_of(settings.graph or "ring-based", ranks)
    destinations, sources = graphs.neighbor_lists(edges, ranks)
    chosen = QueueSettings(
        settings.max_gap,
        settings.backup,
        settings.staleness,
        settings.mean,
        settings.max_skip,
        settings.skip_trigger,
        settings.mode or "standard",
        settings.order,
    ).checked(edges, ranks)

    def make(port: Any, rank: int, size: int) -> Any:
        return QueuedNeighborAverageProtocol(
            port, rank, size, sources[rank], destinations[rank], **chosen.of_rank(rank)
        )

    return PeerMethod(make, settings.nbytes)


def sgp(settings: Settings, ranks: int) -> PeerMethod:
    """Return SGP's ranks, on the directed exponential graph."""
    phases = [
        graphs.neighbor_lists(edges, ranks)
        for edges in graphs.exponential_phases(ranks, settings.neighbors)
    ]

    def make(port: Any, rank: int, size: int) -> Any:
        destinations = [outgoing[rank] for outgoing, _ in phases]
        sources = [incoming[rank] for _, incoming in phases]
        return PushSumProtocol(port, rank, size, destinations, sources, 1)

    return PeerMethod(make, settings.nbytes)


def ad_psgd(settings: Settings, ranks: int) -> PeerMethod:
    """Return AD-PSGD's ranks; without a graph any two may average."""
    neighbors = None
    if settings.graph is not None:
        neighbors, _ = graphs.neighbor_lists(graphs.edges_of(settings.graph, ranks), ranks)

    def make(port: Any, rank: int, size: int) -> Any:
        others = [other for other in range(size) if other != rank]
        chosen = others if neighbors is None else neighbors[rank]
        return PairwiseAverageProtocol(port, rank, size, chosen, settings.seed)

    return PeerMethod(make, settings.nbytes)


def parameter_server(settings: Settings, ranks: int) -> PeerMethod:
    """Return the ranks and their parameter server: rank 0, or one on a machine of its own.

    Raises:
        ValueError: as many backups as ranks, or local steps of another number of ranks.
    """
    if settings.backups >= ranks:
        raise ValueError(f"backups is {settings.backups}, not between 0 and {ranks - 1}")
    mode, max_age, outer = settings.mode or "bsp", settings.max_age or ranks, (0.9, 0.7)
    periods = None
    if mode == "async-local":
        counts = 10 if settings.local_steps is None else settings.local_steps
        periods = counts if isinstance(counts, tuple) else (counts,) * ranks
        if len(periods) != ranks:
            raise ValueError(f"local_steps has {len(periods)} numbers, but there are {ranks} ranks")
    alone = bool(settings.dedicated_server)
    server = ranks if alone else 0
    # Of all ranks of the protocol a round omits the backups, and a server without an application.
    omitted = settings.backups + alone

    def make(port: Any, rank: int, size: int) -> Any:
        return ParameterServerProtocol(port, rank, size, mode, server, omitted, max_age, *outer)

    return PeerMethod(
        make, settings.nbytes, alone, periods=periods, dynamic=bool(settings.dynamic_steps)
    )
