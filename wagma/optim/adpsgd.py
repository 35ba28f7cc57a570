"""AD-PSGD: random pairs average their models; no rank waits (Lian et al., ICML 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives.settings import is_integer
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given
from wagma.optim.extras import Extra
from wagma.optim.shards import Shards

if TYPE_CHECKING:  # importing it initializes MPI
    import networkx
    from typing_extensions import Unpack


class ADPSGD(Averager):
    """Average the model with a random neighbor's while the next gradient is computed.

    A step adds the local optimizer's update to this rank's model, returns the model with the
    averages made meanwhile, and begins an average with a random neighbor; it waits for no rank.

    Source: that of `collectives.PairwiseAverage`, its `collective`.
    """

    _is_weighted = False
    _buffers_apart = True
    _not_for_it = ("average_state", "correction", "correction_period")
    _makes = collectives.PairwiseAverage
    collective: collectives.PairwiseAverage

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        graph: networkx.Graph | str | None = None,
        seed: int = 0,
        average_state: bool = False,
        correction: str | None = None,
        correction_period: int = 10,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            graph: connected networkx graph of the ranks, bipartite or not, or the name of one
                (`collectives.graphs.NAMES`); None: any two ranks may meet.
            seed: seed of the neighbors drawn.
            average_state: whether the optimizer's state is averaged, for ranks with different data.
            correction: "control-variates", or None: for these, too, see `Averager`.
            correction_period: steps whose gradients a control variate is the mean of, at least 1.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)

    def _check_settings(
        self,
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
