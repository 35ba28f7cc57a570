"""A parameter server, for numpy vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives import device
from collectives.peers import PeerCollective
from collectives.planned import Planned
from collectives.settings import is_integer
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["ParameterServer"]


class ParameterServer(PeerCollective):
    """Keeps one model on one rank, to which all ranks send their changes.

    A call sends the application's change to the server, whose engine adds it to the model, and
    waits for the model. A change is added with weight 1/P, so that one change of each rank amounts
    to one step with their mean.

    Args:
        comm, like: those of `GroupAllreduce`. The server's initial vector is the model.
        mode: "bsp": all ranks receive the model when all changes have been added. "backup": the
            same without the changes of the `backups` slowest ranks, which are dropped; the others
            have weight 1/(P − backups). "asp": each change is added and answered at once. "hete":
            the same, but a change to an old model has 1/s of the weight, where s is 1 plus the
            number of complete rounds of P changes added to the model since.
        backups: b of "backup", from 0 to P − 1.
        server: the rank that keeps the model.
        **options: see `CollectiveOptions`.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Chen et
    al., Revisiting Distributed Synchronous SGD, 2016 (backup workers); Jiang et al.,
    Heterogeneity-Aware Distributed Parameter Servers, 2017 (staleness).
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        mode: str = "bsp",
        backups: int = 0,
        server: int = 0,
        **options: Unpack[CollectiveOptions],
    ):
        def plan() -> Planned:
            from collectives.protocols import parameter_server

            if mode not in parameter_server.MODES:
                known = ", ".join(parameter_server.MODES)
                raise ValueError(f"mode is {mode!r}, not one of {known}")
            for name, value in (("backups", backups), ("server", server)):
                if not is_integer(value):
                    raise TypeError(f"{name} is {value!r}, not an integer")
                if not 0 <= value < comm.size:
                    raise ValueError(f"{name} is {value}, not between 0 and {comm.size - 1}")
            described = {"mode": mode, "backups": int(backups), "server": int(server)}
            return described, lambda port: parameter_server.ParameterServerProtocol(
                port, comm.rank, comm.size, mode, int(server), int(backups)
            )

        super().__init__(comm, like, plan, **options)
        self.server = int(server)

    @property
    def dropped(self) -> int:
        """On the server: the number of changes that arrived too late ("backup")."""
        return self._protocol.dropped

    def average(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the server's model, and change nothing else; collective.

        The ranks' changes since their last calls are not in it.
        """
        super().average(vector, stream=stream)

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Add the changes of all ranks since their last calls, and get the model; collective.

        Each change has weight 1/P, as in `join`.
        """
        with device.fetched(self, vector, stream) as vector, self._collectively("synchronize()"):
            self._carry_out(self.native.hand_in, vector)
            self._prepare(vector)
            self._go_on(vector, self.version)

    def load(self, vector: Vector, version: int, *, stream: Stream | None = None) -> None:
        """Continue from the server's `vector` after `version` calls; collective."""
        with device.fetched(self, vector, stream) as vector:
            super().load(vector, version)
            self.synchronize(vector)

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Make no more calls, and serve those of the others until all ranks have joined.

        Collective. The changes since the last calls have weight 1/P. All ranks then have the
        server's model, and have made as many calls as the rank with the most.
        """
        super().join(vector, stream=stream)

    def _prepare(self, vector: Any) -> None:
        self.native.pause(True)  # rounds need not wait for this rank
        self.native.meet()  # the server has all changes once all ranks have entered
        if self.rank == self.server:
            self._read_model(vector)

    def _weight(self) -> float:
        return float(self.rank == self.server)
