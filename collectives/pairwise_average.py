"""The average of random pairs of neighbors, for numpy vectors."""

from __future__ import annotations

import contextlib

from collectives import graphs
from collectives.peers import PeerCollective
from collectives.settings import is_integer

__all__ = ["PairwiseAverage"]


class PairwiseAverage(PeerCollective):
    """Averages each rank's vector with that of a random neighbor, while applications compute.

    A call adds what the application has changed to this rank's model, returns the model as it is,
    waits for nobody, and lets the engine begin an average with a random neighbor: both models
    become their mean, in one step that no other average can come into. The sum of all models
    changes by the changes alone.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        graph: connected undirected networkx graph of the ranks, or a directed one with all edges
            in both directions, bipartite or not; or the name of one (`collectives.graphs.NAMES`).
            None: any rank may meet any other.
        seed: of the neighbors drawn; an integer, from 0 on.
        engine, transport, stall, abort, log_level: those of `GroupAllreduce`.

    Raises:
        TypeError, ValueError: on every rank alike, for what is wrong on any of them or differs.

    Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, 2018,
    Algorithm 1 (AD-PSGD). That it needs no bipartite graph goes beyond the paper.
    """

    def __init__(
        self,
        comm,
        like,
        *,
        graph=None,
        seed=0,
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        def plan():
            from collectives.protocols import pairwise_average

            size, rank = comm.size, comm.rank
            if not is_integer(seed) or seed < 0:
                raise ValueError(f"seed is {seed!r}, not an integer from 0 on")
            if graph is None:
                neighbors = [other for other in range(size) if other != rank]
                edges = "all"
            else:
                edges = graphs.edges_of(graph, size)
                if not graphs.is_symmetric(edges):
                    raise ValueError("graph has edges in one direction only: a pair needs both")
                neighbors = graphs.destinations(edges, rank)
                edges = sorted(edges)
            described = {"graph": edges, "seed": int(seed)}
            return described, lambda mailbox: pairwise_average.PairwiseAverageProtocol(
                mailbox, rank, size, neighbors, int(seed)
            )

        super().__init__(
            comm,
            like,
            plan,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    def average(self, vector) -> None:
        """Overwrite `vector` by the average of all ranks' models, with what each changed since.

        Collective. The application goes on from what was in the vector, and all else is left as it
        is; pairs that are being averaged come first.
        """
        super().average(vector)

    def join(self, vector) -> None:
        """Make no more calls, but take part in others' pairs until all ranks have joined.

        Collective. All ranks then have the average of all models, and have made as many calls as
        the one that made the most.
        """
        super().join(vector)

    @contextlib.contextmanager
    def joining(self, vector):
        """Begin to join, and wait for the others only at the end of the block."""
        with self._collectively("join()"):
            self._begin_to_prepare(vector)
            yield
            self._go_on(vector, self._end_preparing(vector))

    def _prepare(self, vector) -> None:
        self._begin_to_prepare(vector)
        self._end_preparing(vector)

    def _begin_to_prepare(self, vector) -> None:
        """Put in what this rank has changed, and begin no pair any more."""
        self._carry_out(self.native.publish_change, vector)
        self.native.pause(True)

    def _end_preparing(self, vector) -> int:
        """Put this rank's model into `vector`, once no pair is being averaged; collective.

        Returns:
            How many calls the rank with the most has made.
        """
        last = max(self.native.meet())
        # Nobody begins a pair any more, and whoever had begun one has done its part.
        self.native.pause(True)
        self._read_model(vector)
        return last
