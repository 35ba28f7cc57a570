"""D-PSGD: each rank averages its model with its neighbors' (Lian et al., NeurIPS 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    import networkx
    import numpy.typing as npt
    from mpi4py import MPI
    from typing_extensions import Unpack


class DPSGD(PeerAveraging):
    """Average the model with the neighbors' in a graph at every step: x_{k+1} = x_k W + update.

    The update is the local optimizer's, with the gradient at x_k, which is computed while the
    models x_k are sent: a step waits only for neighbors that are a step behind.

    Example:
        >>> optimizer = DPSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.NeighborAverage` that averages.

    Source: that of `collectives.NeighborAverage`.
    """

    collective: collectives.NeighborAverage

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        graph: networkx.Graph | str | None = None,
        mixing: np.ndarray | None = None,
        clock: str = "neighbors",
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            graph: networkx graph of the ranks, (strongly) connected, or the name of one
                (`collectives.graphs.NAMES`); None: the ring.
            mixing: W, doubly stochastic float64 array of shape (P, P); None: Metropolis's weights,
                on the ring 1/3 each.
            clock: "neighbors", or "global" to wait for all ranks in every step.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {"graph": graph, "mixing": mixing, "clock": clock},
            comm=comm,
            **options,
        )

    def _make_collective(
        self,
        comm: MPI.Intracomm,
        *,
        graph: networkx.Graph | str | None,
        mixing: npt.ArrayLike | None,
        clock: str,
        **options: Any,
    ) -> collectives.NeighborAverage:
        self._clock = clock
        return collectives.NeighborAverage(
            comm, self.flat.vectors, graph=graph, mixing=mixing, clock=clock, **options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The clock."""
        return {"clock": self._clock}
