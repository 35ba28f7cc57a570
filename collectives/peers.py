"""The base class of the collectives whose ranks send their vectors to each other."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import device
from collectives.agreement import raise_collectively
from collectives.planned import Planned, PlannedCollective
from collectives.result import Result
from collectives.statistics import Statistics
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

    from collectives.node import Node

__all__ = ["PeerCollective"]

HALVES = ("float16", "bfloat16")


class PeerCollective(PlannedCollective):
    """A collective whose ranks send vectors to each other, by a protocol.

    A base class, not for use by itself: see `NeighborAverage`, `QueuedNeighborAverage`, `PushSum`,
    `PairwiseAverage` and `ParameterServer`, which inherit these methods.

    Each rank has a model, a vector or list of vectors, which is initially its `like`. A call
    publishes the application's changes to the vector since the last call, and returns a model. A
    change that is not finite is excluded. fp16 and bf16 are kept and sent in single precision.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
    """

    # The engine takes the application's arrays as they are, since none is fp16 or bf16.
    _takes_blocks = True

    def __init__(
        self, comm: MPI.Intracomm, like: Vector, plan: Callable[[], Planned], **options: Any
    ):
        """Construct the collective; collective.

        Args:
            comm, like: those of `GroupAllreduce`.
            plan: function that checks the method's arguments, and returns a dict of the settings
                that must be the same on all ranks, and a function that makes the protocol from its
                `Port`.
            **options: see `CollectiveOptions`.
        """
        self._single = not isinstance(like, (list, tuple))
        self._wide: list[np.ndarray | None] = []
        super().__init__(comm, like, plan, **options)

    def _allocate(self, native: Any, node: Node, like: Any, given: dict[str, Any]) -> None:
        messages = self.comm.Dup()
        self._communicators = (*self._communicators, messages)
        whole = any(messages.allgather(self.engine == "none"))
        sharing = given["transport"] != "messages" and len(node.ranks) > 1 and not whole
        mailbox = error = None
        try:
            self.native = native.PeerExchange(**self._common(node, like, given))
            mailbox = self._make_mailbox(native, messages, like, whole, node.ranks, sharing)
        except Exception as problem:  # including those of the method's factory
            error = problem
        raise_collectively(self.comm, error)
        assert mailbox is not None
        failure = node.share(mailbox.queues) if sharing else None
        if given["transport"] == "shared":
            why_not = failure or node.elsewhere
            raise_collectively(
                self.comm, RuntimeError(f"transport: {why_not}") if why_not else None
            )
        self.native.attach(mailbox)

    def _make_mailbox(
        self,
        native: Any,
        messages: MPI.Intracomm,
        like: Any,
        whole: bool,
        ranks: list[int],
        sharing: bool,
    ) -> Any:
        """Make the mailbox, which sends and receives.

        Raises:
            ValueError: `like` is not finite.
        """
        arrays = self._listed(like)
        self._wide = [
            np.empty(array.size, np.float32) if array.dtype.name in HALVES else None
            for array in arrays
        ]
        self._takes_blocks = all(wide is None for wide in self._wide)
        wider = self._wider(arrays)
        _check_finite("like", wider)
        mailbox = native.Mailbox(messages, wider, whole, ranks, sharing)
        mailbox.attach(self._make_protocol(mailbox.deciding))
        return mailbox

    def __call__(self, vector: Vector, *, stream: Stream | None = None) -> Result:
        """Publish the application's changes to `vector`, and overwrite it by a model.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            stream: the stream on which arrays on a CUDA device are ready and will be used next; see
                `collectives.device`.

        Returns:
            A `Result`.

        Raises:
            ValueError, TypeError: the vector is invalid; all ranks are told, and only close() is
                allowed after it.
            RankFailedError: another rank has failed.
            ClosedError: this collective is closed, or a rank that this one waits for is.
            DisagreementError: a rank that this one waits for is in an operation such as `average`;
                all ranks are told, and only close() is allowed after it.

        An exception from a signal handler, such as KeyboardInterrupt, ends the call, but not the
        rank's part in the method; changes made before the next call are then excluded, unless the
        vector has the model already. If it is raised in an operation of all ranks, such as
        `average`, only close() is allowed after it.
        """
        if self._copies is None and stream is None:
            return self._call(vector)
        return device.call(self, vector, stream)

    def _call(self, vector: Any, handover: Any = None) -> Result:
        """Make a call; the vector is read and written in blocks if a `Handover` provides it."""
        with self._guard:
            self._carry_out(self.native.call_peers, vector, handover)
            if not self._takes_blocks:
                # The rounding of the model to fp16 or bf16 is no change by the application.
                self.native.go_on_from(self._wider(self._listed(vector)))
            return self._result(self.version - 1)

    def _result(self, version: int) -> Result:
        return Result(version, True, version, (self.rank,), 1.0, False)

    def average(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the average of all ranks' vectors, and change nothing else.

        Collective: all ranks call it between the same two calls, and none while others `join`.
        """
        with device.fetched(self, vector, stream) as vector, self._collectively("average()"):
            self._prepare(vector)
            self.native.average(vector, self._weight())
            self.native.pause(False)

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Average `vector` in place over all ranks: it becomes each rank's model; collective."""
        with device.fetched(self, vector, stream) as vector, self._collectively("synchronize()"):
            self._prepare(vector)
            self._go_on(vector, self.version)

    def load(self, vector: Vector, version: int, *, stream: Stream | None = None) -> None:
        """Continue from `vector`, which may differ between ranks, at call `version`; collective.

        For checkpoints: all ranks call it with the same version; otherwise they raise
        DisagreementError.

        Raises:
            ValueError: `vector` is not finite.
        """
        with device.fetched(self, vector, stream) as vector, self._collectively("load()"):
            self.native.check(vector)
            _check_finite("the vector", self._wider(self._listed(vector)))
            self.native.pause(True)
            self._load(vector, version)
            self._restart(vector, version)

    def model(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by this rank's current model, and change nothing else."""
        with device.fetched(self, vector, stream) as vector, self._guard:
            self._read_model(vector)

    def _read_model(self, vector: Any) -> None:
        self._carry_out(self.native.read_model, vector)

    def statistics(self) -> Statistics:
        """Return this rank's statistics so far.

        `versions` counts the averages that contain its model, `passive` those that another rank
        requested.
        """
        statistics = super().statistics()
        return statistics._replace(
            versions=self._protocol.averagings,
            passive=self._protocol.passive,
            left_out=self._nonfinite,
            bytes_sent=statistics.bytes_sent + self.native.mailbox.bytes_sent,
        )

    @property
    def _nonfinite(self) -> int:
        nonfinite: int = self.native.mailbox.deciding.nonfinite
        return nonfinite

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Make no more calls, and serve those of the others until all ranks have joined.

        Collective; until then there are no other operations of all ranks. All ranks then have the
        average of all models, including the changes since the last calls, and have made as many
        calls as the rank with the most.
        """
        with self.joining(vector, stream=stream):
            pass

    @contextlib.contextmanager
    def joining(self, vector: Vector, *, stream: Stream | None = None) -> Iterator[None]:
        """Begin to join; wait for the other ranks at the end of the block."""
        with device.fetched(self, vector, stream) as vector, self._collectively("join()"):
            self._carry_out(self.native.join_peers, vector)
            yield
            last = max(self.native.meet())
            self.native.catch_up(last)
            self._read_model(vector)
            self._go_on(vector, last)

    def _go_on(self, vector: Any, version: int) -> None:
        """Average all ranks' prepared vectors: each rank's model from call `version` on."""
        self.native.synchronize(vector, self._weight())
        self._restart(vector, version)

    def _prepare(self, vector: Any) -> None:
        """Set `vector` to this rank's part in an average over all ranks."""
        self.native.pause(True)  # a rank that waits for this one in a call would wait forever

    def _weight(self) -> float:
        """This rank's weight in an average over all ranks."""
        return 1.0

    @property
    def _protocol(self) -> Any:
        return self.native.exchanging

    @property
    def version(self) -> int:
        """The number of this rank's next call: the number of calls made or skipped."""
        return self._protocol.calls

    @property
    def transport(self) -> str:
        """ "shared" if vectors to any rank are sent in shared memory, else "messages"."""
        return "shared" if self.native.mailbox.queues.in_use else "messages"

    # Vectors of fp16 and bf16 are single precision here

    def _listed(self, vector: Any) -> list[Any]:
        return list(vector) if isinstance(vector, (list, tuple)) else [vector]

    def _wider(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays, with copies in single precision for fp16 and bf16."""
        for wide, array in zip(self._wide, arrays):
            if wide is not None:
                wide[:] = array
        return [array if wide is None else wide for wide, array in zip(self._wide, arrays)]

    def _carry_out(self, operation: Callable[..., Any], vector: Any, *arguments: Any) -> None:
        """Call a method of the engine with a vector of the engine's dtypes, and convert it back.

        Even if it raises: a signal's exception may come when the engine has returned the model.
        """
        self.native.check(vector)
        arrays = self._listed(vector)
        wider = self._wider(arrays)
        halves = [(array, ..., wide) for wide, array in zip(self._wide, arrays) if wide is not None]
        try:
            operation(wider, *arguments)
        finally:
            # In one call, within which no signal's handler runs.
            deque(itertools.starmap(operator.setitem, halves), maxlen=0)

    def _restart(self, vector: Any, version: int) -> None:
        self.native.restart(self._wider(self._listed(vector)), version)


def _check_finite(name: str, arrays: list[np.ndarray]) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(f"{name} is not finite: it would enter all ranks' models")
