"""SGP: stochastic gradient push over directed graphs (Assran et al., ICML 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class SGP(PeerAveraging):
    """Push shares of the model along a directed exponential graph after every step.

    A rank's model is the de-biased one, numerator ÷ push-sum weight: the gradient is computed at
    it, the local optimizer's update is added to the numerator, and `averaged()` holds Σ numerators
    ÷ Σ weights. A step waits for the same step of the ranks that send to this one.

    Example:
        >>> optimizer = SGP(torch.optim.SGD(model.parameters(), lr=0.1), model, neighbors=2)

    Attributes:
        collective: the `collectives.PushSum` that averages; its `weight` is this rank's.

    Source: that of `collectives.PushSum`.
    """

    collective: collectives.PushSum

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        neighbors: int = 1,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            neighbors: ranks that each rank sends to in a step, at distances that are powers of two
                and change from step to step; at most ⌈log2 P⌉. The paper has 1 and 2, WAGMA-SGD's
                comparison 2 and 4.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(optimizer, model, {"neighbors": neighbors}, comm=comm, **options)

    def _make_collective(
        self, comm: MPI.Intracomm, *, neighbors: int, **options: Any
    ) -> collectives.PushSum:
        self._neighbors = neighbors
        return collectives.PushSum(comm, self.flat.vectors, neighbors=neighbors, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The number of neighbors."""
        return {"neighbors": self._neighbors}
