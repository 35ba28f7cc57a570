"""The parts of collectives whose simulated ranks send each other vectors: see `parts`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from collectives.errors import ClosedError, DisagreementError
from collectives.memory.layout import Layout
from wagma.simulation.parts import SYNCHRONIZE, Part
from wagma.simulation.peers import PeerMethod
from wagma.simulation.ranks import TimeIsOver

if TYPE_CHECKING:
    from collectives.protocols.peer_rank import PeerRankProtocol
    from wagma.simulation.ranks import Communicator

__all__ = ["Mailbox", "PeerExchange"]

LOAD, MEET = 5, 8  # operations: see `collectives.protocols.all_ranks`


class PeerExchange(Part):
    """A rank of a `PeerCollective`; see `collectives.engine.peers.PeerExchange`."""

    def __init__(self, control: Communicator, like: list[Any], single: bool, **_: Any) -> None:
        super().__init__(control, like, single)
        # Halves are sent in single precision.
        nbytes = self.ranks.job.nbytes or sum(max(4, a.itemsize) * a.size for a in like)
        self.method = self.ranks.method(
            PeerMethod, lambda: PeerMethod(None, nbytes, layout=self.layout)
        )
        self.operations = self.method.operations
        self.calls = 0
        self.mailbox: Any = None

    def attach(self, mailbox: Mailbox) -> None:
        """Serve this mailbox."""
        self.mailbox = mailbox

    @property
    def exchanging(self) -> Any:
        """The rank's protocol."""
        return self.method.protocol(self.rank)

    def close(self) -> None:
        """Leave; what is in progress goes on while other ranks compute."""
        if not (self.closed or self.ranks.over or self.exchanging.leaving):
            self.method.leave(self.rank)
        super().close()

    def check(self, vector: Any) -> None:
        """Raise if this vector cannot be averaged."""
        self.operations.check(vector)

    def settle(self) -> None:
        """Complete no call: none was interrupted."""

    def begin_collectively(self, what: str) -> None:
        """Do nothing: an error ends the job."""

    # Calls and requests

    def call_peers(self, vector: Any, handover: Any = None) -> None:
        """Make the next call, in place."""
        with self._waiting():
            self.method.begin_call(self.rank, vector)
        self._end_request()
        self.calls += 1

    def _request(self, request: Callable[..., bool], *arguments: Any) -> None:
        """Make a request of the method, and wait until it is complete."""
        if self.ranks.over:
            raise TimeIsOver
        if request(self.rank, *arguments):
            with self._waiting():
                pass
        self._end_request()

    def _end_request(self) -> None:
        self.method.end_call(self.rank)
        missing = self.exchanging.missing
        if missing >= 0:
            left = self.method.protocol(missing).leaving
            error = ClosedError if left else DisagreementError
            what = "has closed" if left else "is in an operation of all ranks"
            raise error(f"rank {self.rank} waits in a call for rank {missing}, which {what}")

    def publish_change(self, vector: Any) -> None:
        """Publish the application's change; the application continues from this vector."""
        self.method.publish_change(self.rank, vector)
        self._end_request()

    def hand_in(self, vector: Any) -> None:
        """Hand in the application's change since its last call, outside of any call."""
        self._request(self.method.hand_in, vector)

    def go_on_from(self, vector: Any) -> None:
        """Note that the application holds this vector, which is what it got except for rounding."""
        self.method.go_on_from(self.rank, vector)

    def pause(self, paused: bool) -> None:
        """Begin nothing new between ranks, and wait for what this one has begun; or resume."""
        if paused:
            self._request(self.method.pause)
        else:
            self.method.resume(self.rank)

    def join_peers(self, vector: Any) -> None:
        """Make no more calls, except those that others need, until all ranks have joined."""
        self._request(self.method.join, vector)

    def catch_up(self, calls: int) -> None:
        """Make as many calls as the rank that has made the most, once all have joined."""
        self._request(self.method.catch_up, calls)
        self.method.caught_up(self.rank)

    def read_model(self, vector: Any) -> None:
        """Overwrite the vector with the model, as calls return it."""
        self.method.read_model(self.rank, vector)

    def restart(self, vector: Any, calls: int) -> None:
        """Continue from this vector with so many calls made, as all ranks do at the same time."""
        self.method.restart(self.rank, vector, calls)

    # Operations of all ranks

    def synchronize(self, vector: Any, weight: float | None = None) -> None:
        """Average the vector in place over all ranks."""
        self._average_all(SYNCHRONIZE, vector, weight)

    def load(self, vector: Any, version: int) -> None:
        """Agree on the version to continue from."""
        self._operate(LOAD, vector, None, version)

    def meet(self) -> tuple[int, ...]:
        """Wait until all ranks call this; return how many calls each had made then."""
        self._operate(MEET, None, None)
        return self.operations.calls_made()

    def _average_all(self, operation: int, vector: Any, weight: float | None) -> None:
        self._operate(operation, vector, weight)

    def _operate(self, operation: int, vector: Any, weight: float | None, number: int = 0) -> None:
        with self._waiting():
            self.operations.enter(
                self.rank, operation, vector, weight, self.exchanging.calls, number
            )
        if not self.operations.ended(self.rank):
            raise DisagreementError(f"rank {self.rank} has entered another operation than others")

    def _counts(self) -> tuple[Any, ...]:
        synchronizations = self.operations.synchronizations(self.rank)
        return self.calls, self.calls, synchronizations, 0, 0, (), 0


class Mailbox:
    """A rank's model and messages; see `collectives.engine.mailbox.Mailbox`.

    Args:
        comm: the rank's `Communicator`.
        like: list of arrays, the model at the start, as it is kept and sent.
    """

    def __init__(self, comm: Communicator, like: list[Any], *_: Any) -> None:
        simulation = comm.ranks.simulation
        assert simulation is not None and isinstance(simulation.method, PeerMethod)
        self.method = simulation.method
        self.rank = comm.rank
        layout = Layout([a.dtype.name for a in like], [a.size for a in like], False)
        self.method.initialize(self.rank, like, layout)
        self.port = self.method.ports[self.rank]
        self.deciding: PeerRankProtocol = self.port.deciding
        self.queues = SimpleNamespace(in_use=False)

    def attach(self, protocol: Any) -> None:
        """Set the protocol whose port is `deciding`."""
        self.method.attach(self.rank, protocol)

    @property
    def bytes_sent(self) -> int:
        """Bytes of vectors sent."""
        return self.port.bytes_sent
