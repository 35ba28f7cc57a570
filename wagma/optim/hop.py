"""Hop: averages of neighbors' models through queues (Luo et al., ASPLOS 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given

if TYPE_CHECKING:  # importing it initializes MPI
    import networkx
    from typing_extensions import Unpack


class Hop(Averager):
    """Average the model with the neighbors' in a graph, some of which may be stragglers.

    By default a step is D-PSGD's: x_{k+1} = Σ_j W_ij x_k^j + update, where the update is the local
    optimizer's, with the gradient at x_k. With backup workers a step omits the slowest neighbors'
    models; with staleness it uses the newest models that have arrived, with more weight for newer
    ones. Iterations of neighbors differ by at most `max_gap`. A rank that is always slow may skip
    iterations, and then makes fewer steps: end its training by `collective.version`, not by the
    number of steps.

    Example:
        >>> averager = Hop(model, optimizer, backup=1)
        >>> while averager.collective.version < iterations:
        ...     ...
        ...     optimizer.step()

    Attributes:
        collective: the `collectives.QueuedNeighborAverage` that averages; its `version` is the
            iteration, its `skipped` the number of iterations skipped.

    Source: that of `collectives.QueuedNeighborAverage`.
    """

    _simulated_vectors = 8  # with some that are queued
    _is_weighted = False
    _buffers_apart = True
    _makes = collectives.QueuedNeighborAverage
    collective: collectives.QueuedNeighborAverage

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        graph: networkx.Graph | str | None = "ring-based",
        max_gap: int | str | None = "auto",
        backup: int | Sequence[int] = 0,
        staleness: int | None = None,
        mean: str = "weighted",
        max_skip: int = 0,
        skip_trigger: int | None = None,
        mode: str = "standard",
        order: str = "parallel",
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            graph: the name of a graph of the ranks (`collectives.graphs.NAMES`), or a networkx
                graph, (strongly) connected.
            max_gap: the largest number of iterations that a rank may be ahead of one that averages
                its model; "auto": 5, or staleness + 2 if that is more; None: no limit, which
                backups do not allow.
            backup: number of neighbors whose models a step may omit: one for all ranks, or a
                sequence with that of each rank.
            staleness: number of iterations by which models may be older than the step; None: 0, and
                none is newer. The paper has 5.
            mean: with staleness, "weighted": newer models count more; "simple": all alike.
            max_skip: the largest number of iterations, as the paper counts them, by which a rank
                that is behind advances in a step; the paper has 2 and 10. 0 or 1: none is skipped.
            skip_trigger: a rank skips if it is more than this many iterations behind; None: 1.
            mode: "standard", or "notify-ack": a model is sent once all receivers have used the last
                one.
            order: "parallel": models are sent while the gradient is computed. "serial": a step
                sends the model with its update, and waits for those of the neighbors.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)

    def report(self) -> dict[str, Any]:
        """Return how many iterations this rank has skipped, for a record of the run."""
        return {"skipped_of_rank": self.collective.skipped}
