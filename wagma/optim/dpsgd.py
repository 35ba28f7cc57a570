"""D-PSGD: each rank averages its model with its neighbors' (Lian et al., NeurIPS 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    import networkx
    from mpi4py import MPI


class DPSGD(PeerAveraging):
    """Average the model with the neighbors' in a graph in every step: x_{k+1} = x_k W + update.

    The update is the local optimizer's, of the gradient at x_k, while the neighbors' models x_k
    are on their way: a step waits only for neighbors that are a step behind.

    Example:
        >>> optimizer = DPSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.NeighborAverage` that averages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        graph: networkx.Graph | str | None = None,
        mixing: np.ndarray | None = None,
        clock: str = "neighbors",
        comm: MPI.Intracomm | None = None,
        engine: str | None = None,
        transport: str | None = None,
        stall: float | None = None,
        abort: float | None = None,
        log_level: str | None = None,
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            graph: networkx graph of the ranks, (strongly) connected, or the name of one
                (`collectives.graphs.NAMES`); None: the ring.
            mixing: W, doubly stochastic, of shape (P, P); None: Metropolis's weights, on the ring
                1/3 each.
            clock: "neighbors", or "global" to wait for all ranks in every step.
            engine, transport, stall, abort, log_level: as for `collectives.GroupAllreduce`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {"graph": graph, "mixing": mixing, "clock": clock},
            comm=comm,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    def _make_collective(self, comm, *, graph, mixing, clock, **options):
        self._clock = clock
        return collectives.NeighborAverage(
            comm, self.flat.vectors, graph=graph, mixing=mixing, clock=clock, **options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The clock."""
        return {"clock": self._clock}
