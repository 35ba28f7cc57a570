"""A parameter server, synchronous, asynchronous or with backup workers (Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives.parameter_server import MODE_OF
from collectives.process import place_of
from collectives.result import Result
from collectives.settings import checked_integer
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
        max_age: int | None = None,
        local_steps: int | Sequence[int] | None = None,
        dynamic_steps: bool = False,
        outer_momentum: float | None = None,
        outer_rate: float | None = None,
        server: int = 0,
        comm: MPI.Intracomm | None = None,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            mode: "bsp": a step waits for all ranks' updates. "backup": for those of all but
                `backups` ranks, whose updates are dropped. "asp": for none. "hete": for none, and
                an update has less weight the more the model has changed since. "ringmaster": for
                none, and an update is dropped if the model has taken `max_age` or more since.
                "async-local": only every few steps a rank sends its updates since, in one, and for
                that it waits for none; the model has a momentum of its own.
            backups: of the mode "backup", 0 to P − 1.
            max_age: of the mode "ringmaster", at least 1; None: P.
            local_steps: of the mode "async-local": steps from one update that is sent to the next,
                at least 1: one number for all ranks, or a sequence with a number for each, so that
                slow ones make fewer in the same time; None: 10.
            dynamic_steps: of the mode "async-local": the fastest rank makes `local_steps`, and the
                others as many as they can in the same time, by the speeds that all measure between
                their updates. The first time all make `local_steps`.
            outer_momentum, outer_rate: of the mode "async-local", as for
                `collectives.ParameterServer`.
            server: the rank that keeps the model, and trains as well.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {
                "mode": mode,
                "backups": backups,
                "max_age": max_age,
                "local_steps": local_steps,
                "dynamic_steps": dynamic_steps,
                "outer_momentum": outer_momentum,
                "outer_rate": outer_rate,
                "server": server,
            },
            comm=comm,
            **options,
        )

    def _make_collective(
        self,
        comm: MPI.Intracomm,
        *,
        mode: str,
        backups: int,
        server: int,
        local_steps: int | Sequence[int] | None,
        dynamic_steps: bool,
        **options: Any,
    ) -> collectives.ParameterServer:
        self._settings: dict[str, Any] = {"mode": mode, "backups": backups, "server": server}
        every = steps_of_ranks(mode, local_steps, comm.size)
        if mode == "async-local":
            self._settings["local_steps"] = every[0] if len(set(every)) == 1 else every
            self._settings["dynamic_steps"] = dynamic_steps
        self._local_steps, self._dynamic = every[comm.rank], dynamic_steps
        self._clock = place_of(comm).clock
        self._steps_made = self._sent_at = 0
        self._steps_between = self._local_steps
        self._began = self._clock()
        return collectives.ParameterServer(
            comm, self.flat.vectors, mode=mode, backups=backups, server=server, **options
        )

    def _check_settings(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        mode: str,
        local_steps: int | Sequence[int] | None,
        dynamic_steps: bool,
        **settings: Any,
    ) -> dict[str, Any]:
        steps_of_ranks(mode, local_steps, None)
        if dynamic_steps and mode != "async-local":
            raise ValueError(f"dynamic_steps is set, but mode is {mode!r}, not 'async-local'")
        if dynamic_steps and isinstance(local_steps, Sequence):
            raise ValueError("local_steps has a number for each rank, but dynamic_steps is set")
        return {"local_steps": local_steps, "dynamic_steps": dynamic_steps}

    def _average_model(self, **weight: float) -> None:
        """Send the model's change to the server, if it is due, and receive the model."""
        self._steps_made += 1
        if self._steps_made - self._sent_at == self._steps_between:
            if self._dynamic:
                self._tell_speed()
            super()._average_model(**weight)
            if self._dynamic:
                self._steps_between = self.collective.steps_beside(self._local_steps)
            self._sent_at, self._began = self._steps_made, self._clock()
            return
        self.flat.check_places()
        call = self.collective.version  # which will have this step
        self._note(Result(call, True, call, (self.collective.rank,), 1.0, False))

    def _tell_speed(self) -> None:
        """Have the next call tell the server in how much time these steps were made."""
        self.flat.wait_for_device()
        seconds = self._clock() - self._began
        if seconds > 0:
            self.collective.speed = self._steps_between / seconds

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Do not count the time of the block as that of this rank's steps."""
        before = self._clock()
        try:
            yield
        finally:
            self._began += self._clock() - before

    def synchronize(self) -> None:
        """See `Averaging.synchronize`; the time in it is none of this rank's steps."""
        with self._between_steps():
            super().synchronize()

    @contextmanager
    def _holding(self, get: Callable[[Any], Any], *, together: bool = False) -> Iterator[Any]:
        with self._between_steps(), super()._holding(get, together=together) as got:
            yield got

    @contextmanager
    def _joined(self) -> Iterator[None]:
        with self._between_steps(), super()._joined():
            yield

    @property
    def _steps(self) -> int:
        return self._steps_made

    @property
    def settings(self) -> dict[str, Any]:
        """The mode, the number of backups, the server, and the mode's own arguments."""
        own = {name: getattr(self.collective, name) for name in MODE_OF}
        return self._settings | {name: value for name, value in own.items() if value is not None}

    def report(self) -> dict[str, Any]:
        """Return how many updates the server has dropped, for a record of the run."""
        collective = self.collective
        return {"dropped": collective.dropped if collective.rank == collective.server else None}


def steps_of_ranks(
    mode: str, local_steps: int | Sequence[int] | None, ranks: int | None
) -> tuple[int, ...]:
    """Return how many steps each rank makes from one update that it sends to the next.

    Args:
        ranks: how many there are; None: as many as there are numbers.

    Raises:
        TypeError, ValueError: these are not numbers of steps for so many ranks, or the mode has
            none.
    """
    if mode != "async-local" and local_steps is not None:
        raise ValueError(f"local_steps is {local_steps}, but mode is {mode!r}, not 'async-local'")
    if local_steps is None:
        local_steps = 10 if mode == "async-local" else 1
    if isinstance(local_steps, str) or not isinstance(local_steps, Sequence):
        local_steps = [local_steps] * (ranks or 1)
    if ranks is not None and len(local_steps) != ranks:
        raise ValueError(
            f"local_steps has {len(local_steps)} numbers, not one for each of {ranks} ranks"
        )
    return tuple(checked_integer("local_steps", count, 1) for count in local_steps)
