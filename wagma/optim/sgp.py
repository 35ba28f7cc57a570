"""SGP: stochastic gradient push over directed graphs (Assran et al., ICML 2019)."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack  # torch's, too

import collectives
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given


class SGP(Averager):
    """Push shares of the model along a directed exponential graph after every step.

    A rank's model is the de-biased one, numerator ÷ push-sum weight: the gradient is computed at
    it, the local optimizer's update is added to the numerator, and `averaged()` holds Σ numerators
    ÷ Σ weights. A step waits for the same step of the ranks that send to this one.

    Source: that of `collectives.PushSum`, its `collective`, of which `weight` is this rank's.
    """

    _is_weighted = False
    _buffers_apart = True
    _makes = collectives.PushSum
    collective: collectives.PushSum

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        neighbors: int = 1,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            neighbors: ranks that each rank sends to in a step, at distances that are powers of two
                and change from step to step; at most ⌈log2 P⌉. The paper has 1 and 2, WAGMA-SGD's
                comparison 2 and 4.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)
