"""Averages over directed graphs by push-sum, for numpy vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectives import graphs
from collectives.peers import PeerCollective
from collectives.planned import Planned
from collectives.settings import checked_weight, is_integer
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    import networkx
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["PushSum"]


class PushSum(PeerCollective):
    """Averages over all ranks by pushing shares of vectors and weights along directed edges.

    Rank i has a numerator x_i and a weight w_i: initially its vector times its weight, and that
    weight. A call adds the application's change to x_i, keeps a share 1/(d + 1) of both, sends the
    same share to each of the d ranks that it has edges to, adds the shares received, and returns
    x_i / w_i. Σx changes by the changes only, Σw not at all; without changes all vectors tend to Σx
    / Σw.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        neighbors: number of ranks that each rank sends to in a call, on the directed exponential
            graph: at distances 1, 2, 4, … in turn; at most ⌈log2 P⌉.
        graph: to use instead: a networkx graph of the ranks, (strongly) connected, or the name of
            one (`collectives.graphs.NAMES`). All ranks send along its edges in every call.
        weight: initial w of this rank, from 2⁻²⁰ to 2²⁰: beyond that numerators could underflow or
            overflow.
        **options: see `CollectiveOptions`.

    Attributes:
        weight: current w of this rank.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Kempe, Dobra and Gehrke, Gossip-Based Computation of Aggregate Information, 2003; Assran
    et al., Stochastic Gradient Push for Distributed Deep Learning, 2019, Algorithm 1 (SGP).
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        neighbors: int = 1,
        graph: networkx.Graph | str | None = None,
        weight: float = 1.0,
        **options: Unpack[CollectiveOptions],
    ):
        def plan() -> Planned:
            from collectives.protocols import push_sum

            size, rank = comm.size, comm.rank
            own = checked_weight(weight)
            if not 2**-20 <= own <= 2**20:
                raise ValueError(f"weight is {own:g}, not between 2⁻²⁰ and 2²⁰")
            if not is_integer(neighbors):
                raise TypeError(f"neighbors is {neighbors!r}, not an integer")
            if graph is None:
                phases = graphs.exponential_phases(size, int(neighbors))
            else:
                phases = [graphs.edges_of(graph, size)]
            described = {"graph": [sorted(edges) for edges in phases]}
            return described, lambda port: push_sum.PushSumProtocol(
                port,
                rank,
                size,
                [graphs.destinations(edges, rank) for edges in phases],
                [graphs.sources(edges, rank) for edges in phases],
                own,
            )

        super().__init__(comm, like, plan, **options)

    @property
    def weight(self) -> float:
        return self._protocol.weight

    def model(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the current x / w, and change nothing else."""
        super().model(vector, stream=stream)

    def average(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the weighted average Σ w·vector / Σ w over all ranks; collective.

        If the vectors are those that calls returned, this is Σx / Σw. Nothing else changes.
        """
        super().average(vector, stream=stream)

    def _weight(self) -> float:
        return self.weight
