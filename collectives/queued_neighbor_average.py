"""Averages with neighbors through queues of updates and tokens, for numpy vectors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collectives import graphs
from collectives.peers import PeerCollective
from collectives.planned import Planned
from collectives.queue_settings import QueueSettings
from collectives.result import Result
from collectives.typing import Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    import networkx
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["QueuedNeighborAverage"]

log = logging.getLogger("collectives")


class QueuedNeighborAverage(PeerCollective):
    """Averages each rank's vector with those of its neighbors, which may be unequally fast.

    Let x_j be the vectors in iteration k, and c_i what rank i's application has added to x_i since.
    Then a call returns x_i ← Σ_j W_ji x_j + c_i, where W_ji = 1/n and n is the number of ranks with
    edges to rank i, plus 1. A rank's vector is sent as soon as it is computed, and queued at its
    receivers while these compute. By default the iterations of two ranks differ at most by the
    number of edges between them. With backup workers or bounded staleness they may differ by more,
    up to `max_gap`, and a rank that is always slow may skip iterations.

    Memory in addition to the vector: 2 vectors, and for each rank with an edge to this one at most
    max_gap + 1 that are queued (1 with staleness), and 1 that is being averaged, or 2 with
    skipping. Without a progress thread, also the vectors that are being sent.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        graph: the name of a graph (`collectives.graphs.NAMES`), or a networkx graph of the ranks,
            undirected or directed, (strongly) connected; an edge goes from the sender to the rank
            that averages. None: "ring-based". A graph on which ranks have unequal weights causes a
            warning.
        max_gap: the largest number of iterations, at least 1, that a rank may be ahead of one that
            it has an edge to; it waits for that rank's token. "auto": 5, or staleness + 2 if that
            is more: on an undirected graph, a rank waits for a token and never for a vector if
            max_gap is staleness + 1 or less, which causes a warning. None: no tokens, which backups
            require.
        backup: number of neighbors whose vectors a call may omit, fewer than n: one for all ranks,
            or a sequence with that of each rank (the paper's N_buw(i)). The vectors that have
            arrived have equal weights; later ones are dropped.
        staleness: s: a call waits until a vector of iteration k − s or later has arrived from each
            neighbor, and uses the newest one of each that has arrived since the last call. None:
            all are of iteration k. With backups ("hybrid" in the paper, which gives no rule), a
            call omits that many neighbors.
        mean: how vectors of different iterations are averaged, with staleness. "weighted": the
            weight of a vector is its iteration − (k − s) + 1, that of this rank's own s + 1.
            "simple": equal weights. The paper compares both (section 4.4).
        max_skip: the largest number of iterations, as the paper counts them, by which a call may
            advance if this rank is behind all ranks that it has edges to; it does not overtake
            them, and averages before the iteration that it enters. 0 or 1: none is skipped. It
            requires tokens.
        skip_trigger: a rank skips if it is more than this many iterations behind; None: 1.
        mode: "standard", or "notify-ack": a rank sends its vector once all receivers have used the
            last one; without backups, staleness and skipping, and `max_gap` has no effect.
        order: "parallel": x_j is sent while the application computes c_j, as above. "serial": a
            call sends x_j + c_j, and returns Σ_j W_ji (x_j + c_j).
        **options: see `CollectiveOptions`.

    Attributes:
        max_gap: as resolved: an integer, or None.
        version: number of the next call, its iteration: the number of iterations made or skipped.
        skipped: number of iterations skipped.
        dropped, withheld: number of vectors that arrived too late to be used, and number of vectors
            that this rank did not send because their receivers had advanced.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Luo et al., Hop: Heterogeneity-aware Decentralized Training, ASPLOS 2019.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        graph: networkx.Graph | str | None = None,
        max_gap: int | str | None = "auto",
        backup: int | Sequence[int] = 0,
        staleness: int | None = None,
        mean: str = "weighted",
        max_skip: int = 0,
        skip_trigger: int | None = None,
        mode: str = "standard",
        order: str = "parallel",
        **options: Unpack[CollectiveOptions],
    ):
        given = QueueSettings(max_gap, backup, staleness, mean, max_skip, skip_trigger, mode, order)

        def plan() -> Planned:
            from collectives.protocols import queued_neighbor_average

            edges = graphs.edges_of("ring-based" if graph is None else graph, comm.size)
            settings = given.checked(edges, comm.size)
            self.max_gap = settings.max_gap
            uneven = graphs.unevenness(edges, comm.size)
            self._warnings = [
                f"graph: {uneven}" if uneven else None,
                settings.inert(edges, comm.size),
            ]
            sources = graphs.sources(edges, comm.rank)
            destinations = graphs.destinations(edges, comm.rank)
            return {"graph": sorted(edges), **dataclasses.asdict(settings)}, (
                lambda port: queued_neighbor_average.QueuedNeighborAverageProtocol(
                    port,
                    comm.rank,
                    comm.size,
                    sources,
                    destinations,
                    **settings.of_rank(comm.rank),
                )
            )

        super().__init__(comm, like, plan, **options)
        if self.rank == 0:
            for text in filter(None, self._warnings):
                log.warning("%s", text)

    def _result(self, version: int) -> Result:
        group = self._protocol.group()
        return Result(version, True, version, group, len(group), False)

    @property
    def skipped(self) -> int:
        return self._protocol.skipped

    @property
    def dropped(self) -> int:
        return self._protocol.dropped

    @property
    def withheld(self) -> int:
        return self._protocol.withheld
