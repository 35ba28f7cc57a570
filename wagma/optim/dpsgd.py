"""D-PSGD: each rank averages its model with its neighbors' (Lian et al., NeurIPS 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given

if TYPE_CHECKING:  # importing it initializes MPI
    import networkx
    from typing_extensions import Unpack


class DPSGD(Averager):
    """Average the model with the neighbors' in a graph at every step: x_{k+1} = x_k W + update.

    The update is the local optimizer's, with the gradient at x_k, which is computed while the
    models x_k are sent: a step waits only for neighbors that are a step behind.

    Source: that of `collectives.NeighborAverage`, its `collective`.
    """

    _is_weighted = False
    _buffers_apart = True
    _makes = collectives.NeighborAverage
    collective: collectives.NeighborAverage

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        graph: networkx.Graph | str | None = None,
        mixing: np.ndarray | None = None,
        clock: str = "neighbors",
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            graph: networkx graph of the ranks, (strongly) connected, or the name of one
                (`collectives.graphs.NAMES`); None: the ring.
            mixing: W, doubly stochastic float64 array of shape (P, P); None: Metropolis's weights,
                on the ring 1/3 each.
            clock: what each step waits for: its "neighbors", or with "global" all ranks.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)
