"""The base class of collectives whose calls are executed by a protocol of their method."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from collectives.agreement import raise_collectively
from collectives.collective import Collective
from collectives.typing import Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = ["Planned", "PlannedCollective"]

# Settings that must be the same on all ranks, by name, and a factory of the protocol.
Planned: TypeAlias = "tuple[dict[str, Any], Callable[..., Any]]"


class PlannedCollective(Collective):
    """A collective whose method has a protocol of its own; a base class.

    Its engine implements `settle` and `begin_collectively`. During construction `_like` is the
    initial vector on the host.
    """

    def __init__(
        self, comm: MPI.Intracomm, like: Vector, plan: Callable[[], Planned], **options: Any
    ):
        """Construct the collective; collective.

        Args:
            comm, like: those of `GroupAllreduce`.
            plan: function that checks the method's arguments, and returns a dict of the settings
                that must be the same on all ranks, and a factory of the protocol. What it raises on
                one rank is raised on all.
            **options: see `CollectiveOptions`.
        """
        self._plan = plan
        try:
            self._construct(comm, like, options)
        finally:  # end the cycle: a plan refers to the collective
            for name in ("_plan", "_make_protocol", "_like"):
                self.__dict__.pop(name, None)
        self._guard = self._place.native().Guard()

    def _agree(
        self, comm: MPI.Intracomm, like: Any, given: dict[str, Any], error: Exception | None
    ) -> None:
        described: dict[str, Any] = {}
        problem = None
        self._like = like
        try:
            described, self._make_protocol = self._plan()
        except Exception as caught:  # whatever it is, no rank raises it alone
            problem = caught
        raise_collectively(comm, problem)
        super()._agree(comm, like, given | described, error)

    @contextlib.contextmanager
    def _collectively(self, what: str) -> Iterator[None]:
        """Run a block of several operations of all ranks; on an error only close() is allowed."""
        with self._guard:
            try:
                with self.failing_collectively():
                    self.native.settle()
                    self.native.begin_collectively(what)
                    yield
            finally:
                self.native.begin_collectively("")
