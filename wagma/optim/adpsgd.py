"""AD-PSGD: random pairs average their models; no rank waits (Lian et al., ICML 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    import networkx
    from mpi4py import MPI
    from typing_extensions import Unpack


class ADPSGD(PeerAveraging):
    """Average the model with a random neighbor's while the next gradient is computed.

    A step adds the local optimizer's update to this rank's model, returns the model with the
    averages made meanwhile, and begins an average with a random neighbor; it waits for no rank.

    Example:
        >>> optimizer = ADPSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Attributes:
        collective: the `collectives.PairwiseAverage` that averages.

    Source: that of `collectives.PairwiseAverage`.
    """

    collective: collectives.PairwiseAverage

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        graph: networkx.Graph | str | None = None,
        seed: int = 0,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            graph: connected networkx graph of the ranks, bipartite or not, or the name of one
                (`collectives.graphs.NAMES`); None: any two ranks may meet.
            seed: seed of the neighbors drawn.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(optimizer, model, {"graph": graph, "seed": seed}, comm=comm, **options)

    def _make_collective(
        self, comm: MPI.Intracomm, *, graph: networkx.Graph | str | None, seed: int, **options: Any
    ) -> collectives.PairwiseAverage:
        self._seed = seed
        return collectives.PairwiseAverage(
            comm, self.flat.vectors, graph=graph, seed=seed, **options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The seed of the neighbors drawn."""
        return {"seed": self._seed}
