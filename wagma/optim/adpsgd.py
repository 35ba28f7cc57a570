"""AD-PSGD: random pairs average their models; no rank waits (Lian et al., ICML 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives.settings import is_integer
from wagma.optim.extras import Extra
from wagma.optim.peers import PeerAveraging
from wagma.optim.shards import Shards

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
        average_state: bool = False,
        correction: str | None = None,
        correction_period: int = 10,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            graph: connected networkx graph of the ranks, bipartite or not, or the name of one
                (`collectives.graphs.NAMES`); None: any two ranks may meet.
            seed: seed of the neighbors drawn.
            average_state, correction: for ranks with different data, see `Averaging`.
            correction_period: number of steps whose gradients a control variate is the mean of, at
                least 1.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {
                "graph": graph,
                "seed": seed,
                "average_state": average_state,
                "correction": correction,
                "correction_period": correction_period,
            },
            comm=comm,
            **options,
        )

    def _check_settings(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        average_state: bool,
        correction: str | None,
        correction_period: int,
        **settings: Any,
    ) -> dict[str, Any]:
        self._shards = Shards(average_state, correction, often=True)
        if not is_integer(correction_period) or correction_period < 1:
            raise ValueError(
                f"correction_period is {correction_period!r}, not an integer of at least 1"
            )
        return {**self._shards.settings, "correction_period": int(correction_period)}

    def _make_extras(self, *, correction_period: int, **settings: Any) -> list[Extra]:
        self._correction_period = int(correction_period)
        return self._shards.make(self.flat, self._correction_period, replaced=False)

    def _make_collective(
        self,
        comm: MPI.Intracomm,
        *,
        graph: networkx.Graph | str | None,
        seed: int,
        average_state: bool,
        correction: str | None,
        correction_period: int,
        **options: Any,
    ) -> collectives.PairwiseAverage:
        self._seed = seed
        return collectives.PairwiseAverage(comm, self._vectors, graph=graph, seed=seed, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The seed of the neighbors drawn, and what is averaged beside the model."""
        period = {"correction_period": self._correction_period}
        chosen = self._shards.settings
        return {"seed": self._seed, **chosen, **(period if chosen["correction"] else {})}
