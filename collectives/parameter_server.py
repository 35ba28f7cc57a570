"""A parameter server, for numpy vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives import device
from collectives.peers import PeerCollective
from collectives.planned import Planned
from collectives.settings import checked_integer, checked_weight
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["ParameterServer"]

# The mode that has an argument, where others must not be given it.
MODE_OF = {
    "max_age": "ringmaster",
    "outer_momentum": "async-local",
    "outer_rate": "async-local",
}


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
            number of complete rounds of P changes added to the model since. "ringmaster": as "asp",
            but a change is dropped if `max_age` or more were added to the model since.
            "async-local": as "asp", for changes of several steps each, which have weight ε/P; after
            every P of them the model looks ahead, by β times its changes in sum, of which those of
            each earlier P have decayed by β (delayed Nesterov momentum). Changes outside of calls
            (`synchronize`, `join`) have weight 1/P here, too; momentum starts again with each.
        backups: b of "backup", from 0 to P − 1.
        max_age: R of "ringmaster", at least 1; None: P.
        outer_momentum: β of "async-local", from 0 to less than 1; None: 0.9.
        outer_rate: ε of "async-local", at least 0; None: 1 − β.
        server: the rank that keeps the model.
        **options: see `CollectiveOptions`.

    Attributes:
        server: the rank that keeps the model.
        max_age, outer_momentum, outer_rate: R, β and ε; None except with their modes.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Chen et
    al., Revisiting Distributed Synchronous SGD, 2016 (backup workers); Jiang et al.,
    Heterogeneity-Aware Distributed Parameter Servers, 2017 (staleness); Maranjyan et al.,
    Ringmaster ASGD, 2025 (dropping what is too old); Liu et al., Asynchronous Local-SGD Training
    for Language Modeling, 2024 (Algorithm 3, of c = 0).
    """

    max_age: int | None
    outer_momentum: float | None
    outer_rate: float | None

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        mode: str = "bsp",
        backups: int = 0,
        max_age: int | None = None,
        outer_momentum: float | None = None,
        outer_rate: float | None = None,
        server: int = 0,
        **options: Unpack[CollectiveOptions],
    ):
        def plan() -> Planned:
            from collectives.protocols import parameter_server

            if mode not in parameter_server.MODES:
                known = ", ".join(parameter_server.MODES)
                raise ValueError(f"mode is {mode!r}, not one of {known}")
            given = {"max_age": max_age, "outer_momentum": outer_momentum, "outer_rate": outer_rate}
            check_modes(mode, given)
            described: dict[str, Any] = {"mode": mode, **given}
            for name, value in (("server", server), ("backups", backups)):
                described[name] = checked_integer(name, value, 0, comm.size - 1)
            if mode == "ringmaster":
                age = comm.size if max_age is None else max_age
                described["max_age"] = checked_integer("max_age", age, 1)
            elif mode == "async-local":
                momentum = checked_momentum(0.9 if outer_momentum is None else outer_momentum)
                rate = round(1 - momentum, 12) if outer_rate is None else outer_rate
                described["outer_momentum"] = momentum
                described["outer_rate"] = checked_weight(rate, "outer_rate")
            for name in MODE_OF:
                setattr(self, name, described[name])
            return described, lambda port: parameter_server.ParameterServerProtocol(
                port, comm.rank, comm.size, **described
            )

        super().__init__(comm, like, plan, **options)
        self.server = int(server)

    @property
    def speed(self) -> float:
        """This rank's speed, in steps per second, which its calls tell the server; 0: unknown.

        Raises:
            TypeError, ValueError: it is set to something else than a number of at least 0.
        """
        return self._protocol.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._protocol.speed = checked_weight(speed, "speed")

    def steps_beside(self, most: int) -> int:
        """Return how many steps this rank makes while the fastest one makes `most`, at least 1.

        The server's answer to each call says how fast the fastest rank is, of those whose `speed`
        it knows; until then, the answer is `most`.
        """
        return self._protocol.steps_beside(most)

    @property
    def dropped(self) -> int:
        """On the server: the number of changes dropped ("backup", "ringmaster")."""
        return self._protocol.dropped

    def average(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the server's model, and change nothing else; collective.

        The ranks' changes since their last calls are not in it.
        """
        super().average(vector, stream=stream)

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Add the changes of all ranks since their last calls, and get the model; collective.

        Each change has weight 1/P, as in `join`, in every mode.
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

        Collective. The changes since the last calls have weight 1/P in every mode. All ranks then
        have the server's model, and have made as many calls as the rank with the most.
        """
        super().join(vector, stream=stream)

    def _prepare(self, vector: Any) -> None:
        self.native.pause(True)  # rounds need not wait for this rank
        self.native.meet()  # the server has all changes once all ranks have entered
        if self.rank == self.server:
            self._read_model(vector)

    def _weight(self) -> float:
        return float(self.rank == self.server)


def check_modes(mode: str, given: dict[str, Any]) -> None:
    """Raise ValueError if an argument is given that belongs to another mode."""
    for name, value in given.items():
        if value is not None and mode != MODE_OF[name]:
            raise ValueError(f"{name} is {value!r}, but mode is {mode!r}, not {MODE_OF[name]!r}")


def checked_momentum(momentum: float) -> float:
    """Return an outer momentum as a float; raise TypeError or ValueError if it is invalid."""
    value = checked_weight(momentum, "outer_momentum")
    if value >= 1:
        raise ValueError(f"outer_momentum is {value:g}, but must be less than 1")
    return value
