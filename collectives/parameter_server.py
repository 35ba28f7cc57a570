"""A parameter server, for numpy vectors."""

from __future__ import annotations

from collectives.peers import PeerCollective
from collectives.settings import is_integer

__all__ = ["ParameterServer"]


class ParameterServer(PeerCollective):
    """Keeps one model on one rank, to which all ranks send their changes.

    A call sends what the application has changed to the server, whose engine adds it to the model,
    and waits for the model. What a change counts is 1/P, so that one of each rank makes one step
    with their mean.

    Args:
        comm, like: those of `GroupAllreduce`. The server's initial vector is the model.
        mode: "bsp": all changes are added, then all ranks get the model. "backup": all but those of
            the `backups` slowest ranks, which are dropped, and the others count 1/(P − backups).
            "asp": each change is added and answered at once. "hete": likewise, but a change to an
            old model counts 1/s of that, s being 1 plus the number of whole rounds of P changes
            that the model has taken in since.
        backups: b of "backup", from 0 to P − 1.
        server: the rank that keeps the model.
        engine, transport, stall, abort, log_level: those of `GroupAllreduce`.

    Raises:
        TypeError, ValueError: on every rank alike, for what is wrong on any of them or differs.

    Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Chen et
    al., Revisiting Distributed Synchronous SGD, 2016 (backup workers); Jiang et al.,
    Heterogeneity-Aware Distributed Parameter Servers, 2017 (staleness).
    """

    def __init__(
        self,
        comm,
        like,
        *,
        mode="bsp",
        backups=0,
        server=0,
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        def plan():
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
            return described, lambda mailbox: parameter_server.ParameterServerProtocol(
                mailbox, comm.rank, comm.size, mode, int(server), int(backups)
            )

        super().__init__(
            comm,
            like,
            plan,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )
        self.server = int(server)

    @property
    def dropped(self) -> int:
        """On the server: how many changes have come too late ("backup")."""
        return self._protocol.dropped

    def average(self, vector) -> None:
        """Overwrite `vector` by the server's model, and leave all else as it is; collective.

        What ranks have changed since their last calls is not in it.
        """
        super().average(vector)

    def synchronize(self, vector) -> None:
        """Add what all ranks have changed since their last calls, and get the model; collective.

        A change counts 1/P, as in `join`.
        """
        with self._collectively("synchronize()"):
            self._carry_out(self.native.hand_in, vector)
            self._prepare(vector)
            self._go_on(vector, self.version)

    def load(self, vector, version: int) -> None:
        """Go on from the server's `vector` after `version` calls; collective."""
        super().load(vector, version)
        self.synchronize(vector)

    def join(self, vector) -> None:
        """Make no more calls, but let those of the others go on until all ranks have joined.

        Collective. What was changed since the last call counts 1/P; then all ranks have the
        server's model, and have made as many calls as the one that made the most.
        """
        super().join(vector)

    def _prepare(self, vector) -> None:
        self.native.pause(True)  # rounds need not wait for this rank
        self.native.meet()  # the server has all changes once all are here
        if self.rank == self.server:
            self._read_model(vector)

    def _weight(self) -> float:
        return float(self.rank == self.server)
