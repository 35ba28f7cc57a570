"""A parameter server, synchronous, asynchronous or with backup workers (Li et al., OSDI 2014)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.peers import PeerAveraging

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class ParameterServer(PeerAveraging):
    """Send every step's update to one rank, which keeps the model, and receive the model.

    The update is the local optimizer's, whose state, such as its momentum, is not averaged; with
    plain SGD this is equivalent to sending gradients. `Averaging` describes what all methods share;
    `averaged()` holds the server's model.

    Example:
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = ParameterServer(sgd, model, mode="asp")

    Attributes:
        collective: the `collectives.ParameterServer` that keeps the model.

    Source: that of `collectives.ParameterServer`.
    """

    collective: collectives.ParameterServer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        mode: str = "bsp",
        backups: int = 0,
        server: int = 0,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            mode: "bsp": a step waits for all ranks' updates. "backup": for those of all but
                `backups` ranks, whose updates are dropped. "asp": for none. "hete": for none, and
                an update has less weight the more the model has changed since.
            backups: of the mode "backup", 0 to P − 1.
            server: the rank that keeps the model, and trains as well.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {"mode": mode, "backups": backups, "server": server},
            comm=comm,
            **options,
        )

    def _make_collective(
        self, comm: MPI.Intracomm, *, mode: str, backups: int, server: int, **options: Any
    ) -> collectives.ParameterServer:
        self._settings: dict[str, Any] = {"mode": mode, "backups": backups, "server": server}
        return collectives.ParameterServer(comm, self.flat.vectors, **self._settings, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The mode, the number of backups and the server."""
        return dict(self._settings)
