"""The parts of simulated ranks in collectives whose groups or averages any rank may start.

See `wagma.simulation.parts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives.errors import DisagreementError
from collectives.result import Result
from wagma.simulation.formed_groups import FormedGroupMethod
from wagma.simulation.parts import AVERAGE, SYNCHRONIZE, Part
from wagma.simulation.triggered_average import TriggeredAveraging

if TYPE_CHECKING:
    from wagma.simulation.ranks import Communicator

__all__ = ["FormedGroups", "TriggeredAverages"]

LOAD, JOIN, MEET = 5, 6, 8  # operations: see `collectives.protocols.all_ranks`


class FormedGroups(Part):
    """A rank whose groups a protocol forms; see `collectives.engine.formed_groups.FormedGroups`."""

    group_bytes = 0

    def __init__(
        self, control: Communicator, like: list[Any], *, groups: Any, sharing: bool, **common: Any
    ) -> None:
        super().__init__(control, like, **common)
        self.timely = 0

        def make() -> FormedGroupMethod:
            return FormedGroupMethod(None, self.nbytes, 1, self.layout, sharing)

        self.method = self.ranks.method(FormedGroupMethod, make)
        self.queue = self.method.port(self.rank)
        self.operations = self.method.operations

    def attach(self, protocol: Any, like: Any) -> None:
        """Set the protocol that forms groups, and begin it."""
        self.queue.attach(protocol, like)

    def call(self, vector: Any, handover: None) -> Result:
        """Make the next call, in place."""
        self.check(vector)
        with self._waiting():
            self.queue.begin_call(vector)
        deciding = self.queue.deciding
        self.timely += deciding.timely
        version = self.queue.protocol.calls - 1
        members = deciding.last.listed()[0] or (self.rank,)
        return Result(version, deciding.timely, version, members, deciding.total, False)

    def check(self, vector: Any) -> None:
        """Raise if this vector cannot be averaged."""
        self.operations.check(vector)

    # Operations of all ranks

    def settle(self) -> None:
        """Do nothing: no exception interrupts a call."""

    def begin_collectively(self, what: str) -> None:
        """Note nothing: no rank asks others what they do."""

    def pause(self, paused: bool) -> None:
        """Begin nothing new between ranks, and wait for what this one has begun; or resume."""
        if not paused:
            self.queue.resume()
            return
        with self._waiting():
            self.queue.pause()

    def average(self, vector: Any, weight: float | None = None) -> None:
        """Overwrite the vector by all ranks' average, and change nothing else."""
        self._operate(AVERAGE, vector, weight)

    def synchronize(self, vector: Any, weight: float | None = None) -> None:
        """Average over all ranks, which continue from that."""
        self._operate(SYNCHRONIZE, vector, weight)

    def load(self, vector: Any, version: int) -> None:
        """Continue from this vector, and make this version the next one."""
        self._operate(LOAD, vector, None, version)

    def meet(self) -> tuple[int, ...]:
        """Wait until all ranks call this; return how many calls each had made then."""
        self._operate(MEET, None, None)
        return self.operations.calls_made()

    def _operate(self, operation: int, vector: Any, weight: float | None, number: int = 0) -> None:
        calls = self.queue.protocol.calls
        with self._waiting():
            self.operations.enter(self.rank, operation, vector, weight, calls, number)
        if not self.operations.ended(self.rank):
            raise DisagreementError(f"rank {self.rank} has entered another operation than others")

    def add_moved(self, vector: Any) -> None:
        """Add to the vector what averages changed since the last call, as a call would."""
        self.queue.add_moved(vector)

    def go_on_from(self, vector: Any) -> None:
        """Take this vector, from which the application continues, as the model."""
        self.queue.go_on_from(vector)

    def restart(self, calls: int) -> None:
        """Continue with this number of calls made, once all ranks have paused."""
        self.queue.restart(calls)

    def close(self) -> None:
        """Leave: the others form groups without this rank."""
        if not (self.closed or self.ranks.over):
            self.queue.leave()
        super().close()

    # What it reports

    @property
    def who_was_met(self) -> list[float]:
        """For each rank, the sum of 1/|S| over the groups S with both it and this one."""
        return self.queue.met

    @property
    def group_nonfinite(self) -> int:
        """How many vectors were left out of groups."""
        return self.queue.deciding.nonfinite

    def _counts(self) -> tuple[Any, ...]:
        deciding = self.queue.deciding
        synchronizations = self.operations.synchronizations(self.rank)
        calls = self.queue.protocol.calls
        return (calls, self.timely, synchronizations, deciding.averages, deciding.passive, (), 0)


class Begun:
    """An operation that was begun: `wait` waits for its end.

    Args:
        part: the rank's part.
        result: of a call that is complete; None: the operation is not.
    """

    def __init__(self, part: TriggeredAverages, result: Result | None = None) -> None:
        self.part, self.result = part, result

    def wait(self) -> Result | None:
        """Wait until it is complete."""
        if self.part.begun is self:
            self.part.begun = None
            self.part.ranks.wait(self.part.rank)
        return self.result


class TriggeredAverages(Part):
    """A rank of `collectives.TriggeredAverage`; see `collectives.engine.triggered_averages`."""

    def __init__(
        self,
        control: Communicator,
        like: list[Any],
        *,
        sync_period: int,
        weighing: tuple[int, float, float],
        wire_dtype: str | None,
        sharing: bool,
        **common: Any,
    ) -> None:
        super().__init__(control, like, **common)
        self.begun: Begun | None = None

        def make() -> TriggeredAveraging:
            return TriggeredAveraging(
                sync_period, self.nbytes, self.layout, sharing, weighing, wire_dtype
            )

        self.method = self.ranks.method(TriggeredAveraging, make)
        self.method.send_differences(self.rank)

    def compress_from_initial(self, like: Any) -> None:
        """Send compressed vectors as differences from this initial one, which all ranks have."""
        self.method.send_differences(self.rank, like)

    def call(self, vector: Any, weight: float) -> Result:
        """Make a call, which is an average over all ranks if one has been started."""
        with self._waiting():
            self.method.begin_call(self.rank, vector, weight)
        return Result(*self.method.result_of(self.rank))

    def start(self, vector: Any, weight: float) -> Begun:
        """Make a call; it is complete when this returns."""
        return Begun(self, self.call(vector, weight))

    def start_join(self, vector: Any) -> Begun:
        """Begin to take part in the others' averages until all have joined."""
        self.ranks.enter(self.rank)
        self.begun = Begun(self)
        self.method.begin_operation(self.rank, JOIN, vector)
        return self.begun

    def _average_all(self, operation: int, vector: Any, weight: float | None) -> None:
        with self._waiting():
            self.method.begin_operation(self.rank, operation, vector, weight)

    def load(self, vector: Any, version: int) -> None:
        """Continue from this vector, and make this version the next one."""
        with self._waiting():
            self.method.begin_operation(self.rank, LOAD, vector, None, version)

    def close(self) -> None:
        """Leave: the rank stays joined, with a copy of its vector, and waits for nobody."""
        if not (self.closed or self.ranks.over):
            self.method.leave(self.rank)
        super().close()

    @property
    def calls(self) -> int:
        """How many calls the application has made."""
        return self._counts()[0]

    @property
    def version(self) -> int:
        """The number of the next average."""
        return self.method.version_of(self.rank)

    def _counts(self) -> tuple[Any, ...]:
        return self.method.counts_of(self.rank)
