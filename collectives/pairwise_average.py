"""Averages of random pairs of neighbors, for numpy vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from collectives import device, graphs
from collectives.peers import PeerCollective
from collectives.planned import Planned
from collectives.settings import is_integer
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    import networkx
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["PairwiseAverage"]


class PairwiseAverage(PeerCollective):
    """Averages each rank's vector with that of a random neighbor, while applications compute.

    A call adds the application's change to this rank's model, returns the current model without
    waiting for any rank, and lets the engine begin an average with a random neighbor: both models
    become their mean, atomically with respect to other averages. The sum of all models changes by
    the changes only.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        graph: connected undirected networkx graph of the ranks, or a directed one with all edges in
            both directions, bipartite or not; or the name of one (`collectives.graphs.NAMES`).
            None: any two ranks may meet.
        seed: seed of the neighbors drawn, an integer of at least 0.
        **options: see `CollectiveOptions`.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, 2018,
    Algorithm 1 (AD-PSGD). Graphs that are not bipartite go beyond the paper.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        graph: networkx.Graph | str | None = None,
        seed: int = 0,
        **options: Unpack[CollectiveOptions],
    ):
        def plan() -> Planned:
            from collectives.protocols import pairwise_average

            size, rank = comm.size, comm.rank
            if not is_integer(seed) or seed < 0:
                raise ValueError(f"seed is {seed!r}, not an integer of at least 0")
            if graph is None:
                neighbors = [other for other in range(size) if other != rank]
                described: dict[str, Any] = {"graph": "all"}
            else:
                edges = graphs.edges_of(graph, size)
                if not graphs.is_symmetric(edges):
                    raise ValueError("graph has edges in one direction only: a pair needs both")
                neighbors = graphs.destinations(edges, rank)
                described = {"graph": sorted(edges)}
            return described | {
                "seed": int(seed)
            }, lambda port: pairwise_average.PairwiseAverageProtocol(
                port, rank, size, neighbors, int(seed)
            )

        super().__init__(comm, like, plan, **options)

    def average(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the average of all ranks' models and their changes since.

        Collective. The application continues from its vector's previous content, and nothing else
        changes; pairs in progress are completed first.
        """
        super().average(vector, stream=stream)

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Make no more calls, and take part in others' pairs until all ranks have joined.

        Collective. All ranks then have the average of all models, and have made as many calls as
        the rank with the most.
        """
        super().join(vector, stream=stream)

    @contextlib.contextmanager
    def joining(self, vector: Vector, *, stream: Stream | None = None) -> Iterator[None]:
        """Begin to join; wait for the other ranks at the end of the block."""
        with device.fetched(self, vector, stream) as vector, self._collectively("join()"):
            self._begin_to_prepare(vector)
            yield
            self._go_on(vector, self._end_preparing(vector))

    def _prepare(self, vector: Any) -> None:
        self._begin_to_prepare(vector)
        self._end_preparing(vector)

    def _begin_to_prepare(self, vector: Any) -> None:
        """Add this rank's change to its model, and begin no further pair."""
        self._carry_out(self.native.publish_change, vector)
        self.native.pause(True)

    def _end_preparing(self, vector: Any) -> int:
        """Copy this rank's model to `vector`, once no pair is in progress; collective.

        Returns:
            The number of calls of the rank with the most.
        """
        last = max(self.native.meet())
        # No rank begins a pair any more, and each that had begun one has done its part.
        self.native.pause(True)
        self._read_model(vector)
        return last
