"""Averages with the neighbors in a graph, for numpy vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectives import graphs
from collectives.peers import PeerCollective
from collectives.planned import Planned
from collectives.result import Result
from collectives.typing import Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    import networkx
    import numpy.typing as npt
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["NeighborAverage"]


class NeighborAverage(PeerCollective):
    """Averages each rank's vector with those of its neighbors in a graph.

    Let x_j be the vectors after k calls, and c_i what rank i's application has added to x_i since.
    Then call k returns x_i ← Σ_j W_ji x_j + c_i. A rank's vector is sent as soon as it is computed,
    so a call waits only for neighbors that have not completed their previous call. The mean of all
    ranks' vectors changes by the mean of the c_i only.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        graph: networkx graph of the ranks, undirected or directed, (strongly) connected; an edge
            goes from the sender to the rank that averages. Or the name of a graph
            (`collectives.graphs.NAMES`). None: the ring, in both directions.
        mixing: doubly stochastic float64 array W of shape (P, P); W[j, i] is the weight of rank j's
            vector at rank i, 0 if there is no edge. None: Metropolis's weights, on the ring 1/3
            each (`collectives.graphs.mixing_matrix`).
        clock: "neighbors": a call waits for the neighbors. "global": it waits for the same call of
            all ranks, as in WAGMA-SGD's comparison.
        **options: see `CollectiveOptions`.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, 2017,
    Algorithm 1 (D-PSGD).
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        graph: networkx.Graph | str | None = None,
        mixing: npt.ArrayLike | None = None,
        clock: str = "neighbors",
        **options: Unpack[CollectiveOptions],
    ):
        def plan() -> Planned:
            from collectives.protocols import neighbor_average

            size, rank = comm.size, comm.rank
            if clock not in ("neighbors", "global"):
                raise ValueError(f"clock is {clock!r}, not one of neighbors, global")
            edges = graphs.edges_of(graph, size)
            if mixing is None:
                matrix = graphs.mixing_matrix(edges, size)
            else:
                matrix = graphs.check_mixing(mixing, edges, size)
            sources = [j for j in graphs.sources(edges, rank) if matrix[j, rank]]
            self._group = tuple(sorted([rank, *sources]))
            described = {"graph": sorted(edges), "mixing": matrix.tolist(), "clock": clock}
            return described, lambda port: neighbor_average.NeighborAverageProtocol(
                port,
                rank,
                size,
                sources,
                [matrix[j, rank] for j in sources],
                matrix[rank, rank],
                [i for i in graphs.destinations(edges, rank) if matrix[rank, i]],
                clock == "global",
            )

        super().__init__(comm, like, plan, **options)

    def _result(self, version: int) -> Result:
        return Result(version, True, version, self._group, len(self._group), False)
