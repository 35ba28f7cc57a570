"""A parameter server, synchronous, asynchronous or with backup workers (Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives.process import place_of
from collectives.result import Result
from collectives.settings import checked_integer
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class ParameterServer(Averager):
    """Send every step's update to one rank, which keeps the model, and receive the model.

    The update is the local optimizer's, whose state, such as its momentum, is not averaged; with
    plain SGD this is equivalent to sending gradients. `Averager` describes what all methods share;
    `averaged()` holds the server's model.

    Source: that of `collectives.ParameterServer`, its `collective`, which keeps the model.
    """

    _is_weighted = False
    _buffers_apart = True
    _makes = collectives.ParameterServer
    _not_for_it = ("local_steps", "dynamic_steps")
    collective: collectives.ParameterServer

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        mode: str = "bsp",
        backups: int = 0,
        max_age: int | None = None,
        local_steps: int | Sequence[int] | None = None,
        dynamic_steps: bool = False,
        outer_momentum: float | None = None,
        outer_rate: float | None = None,
        server: int = 0,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            mode: "bsp": a step waits for all ranks' updates. "backup": for those of all but
                `backups` ranks, whose updates are dropped. "asp": for none. "hete": for none, and
                an update has less weight the more the model has changed since. "ringmaster": for
                none, and an update is dropped if the model has taken `max_age` or more since.
                "async-local": only every few steps a rank sends its updates since, in one, and for
                that it waits for none; the model has a momentum of its own.
            backups: of the mode "backup": ranks that a step does not wait for, from 0 to P − 1.
            max_age: of "ringmaster": updates since that make one too old; None: number of ranks P.
            local_steps: of the mode "async-local": steps from one update that is sent to the next,
                at least 1: one number for all ranks, or a sequence with a number for each, so that
                slow ones make fewer in the same time; None: 10.
            dynamic_steps: of the mode "async-local": the fastest rank makes `local_steps`, and the
                others as many as they can in the same time, by the speeds that all measure between
                their updates. The first time all make `local_steps`.
            outer_momentum: of "async-local": the model's momentum, at least 0, below 1; None: 0.9.
            outer_rate: of "async-local": factor of updates, at least 0; None: 1 - outer_momentum.
            server: the rank that keeps the model, and trains as well.
            **options: see `AveragerOptions`.
        """
        super().__init__(model, optimizer, given(locals()), **options)

    def _make_collective(self, comm: MPI.Intracomm, **options: Any) -> Any:
        every = steps_of_ranks(options["mode"], options["local_steps"], comm.size)
        if options["mode"] == "async-local":  # as settings show it
            self._arguments["local_steps"] = every[0] if len(set(every)) == 1 else every
        self._local_steps, self._dynamic = every[comm.rank], options["dynamic_steps"]
        self._clock = place_of(comm).clock
        self._since_sent = 0
        self._steps_between = self._local_steps
        self._began = self._clock()
        return super()._make_collective(comm, **options)

    def _check_settings(
        self,
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
        self._since_sent += 1
        if self._since_sent == self._steps_between:
            if self._dynamic:
                self._tell_speed()
            super()._average_model(**weight)
            if self._dynamic:
                self._steps_between = self.collective.steps_beside(self._local_steps)
            self._since_sent, self._began = 0, self._clock()
            return
        self._give()
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
        """See `Averager.synchronize`; the time in it is none of this rank's steps."""
        with self._between_steps():
            super().synchronize()

    @contextmanager
    def _holding(self, get: Callable[[], Any], *, together: bool = False) -> Iterator[Any]:
        with self._between_steps(), super()._holding(get, together=together) as got:
            yield got

    @contextmanager
    def _joined(self) -> Iterator[None]:
        with self._between_steps(), super()._joined():
            yield

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
