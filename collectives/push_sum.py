"""The average over directed graphs by push-sum, for numpy vectors."""

from __future__ import annotations

from collectives import graphs
from collectives.peers import PeerCollective
from collectives.settings import checked_weight, is_integer

__all__ = ["PushSum"]


class PushSum(PeerCollective):
    """Averages over all ranks by pushing shares of vectors and weights along directed edges.

    Rank i has a numerator x_i and a weight w_i, at first its vector times its weight and that. A
    call adds what the application has changed to x_i, keeps a share 1/(d + 1) of both and sends one
    each to the d ranks that it has edges to, adds up what comes, and returns x_i / w_i. Σx changes
    by the changes alone and Σw not at all, and without changes all vectors tend to Σx / Σw.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        neighbors: ranks that each rank sends to in a call, on the directed exponential graph: at
            distances 1, 2, 4, … in turn; at most ⌈log2 P⌉.
        graph: networkx graph of the ranks, (strongly) connected, or the name of one
            (`collectives.graphs.NAMES`), along whose edges all send in every call, instead of that.
        weight: w of this rank at the start, from 2⁻²⁰ to 2²⁰: beyond that numerators could
            underflow or overflow.
        engine, transport, stall, abort, log_level: those of `GroupAllreduce`.

    Attributes:
        weight: w of this rank now.

    Raises:
        TypeError, ValueError: on every rank alike, for what is wrong on any of them or differs.

    Source: Kempe, Dobra and Gehrke, Gossip-Based Computation of Aggregate Information, 2003; Assran
    et al., Stochastic Gradient Push for Distributed Deep Learning, 2019, Algorithm 1 (SGP).
    """

    def __init__(
        self,
        comm,
        like,
        *,
        neighbors=1,
        graph=None,
        weight=1.0,
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        def plan():
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
            return described, lambda mailbox: push_sum.PushSumProtocol(
                mailbox,
                rank,
                size,
                [graphs.destinations(edges, rank) for edges in phases],
                [graphs.sources(edges, rank) for edges in phases],
                own,
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

    @property
    def weight(self) -> float:
        return self._protocol.weight

    def model(self, vector) -> None:
        """Overwrite `vector` by x / w as it is now, and leave all else as it is."""
        super().model(vector)

    def average(self, vector) -> None:
        """Overwrite `vector` by the weighted average Σ w·vector / Σ w over all ranks; collective.

        Where the vectors are what calls have returned that is Σx / Σw. All else is left as it is.
        """
        super().average(vector)

    def _weight(self) -> float:
        return self.weight
