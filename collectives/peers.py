"""What the collectives have in common whose ranks send their vectors to one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from collectives.agreement import raise_collectively
from collectives.planned import PlannedCollective
from collectives.result import Result
from collectives.statistics import Statistics

__all__ = ["PeerCollective"]

HALVES = ("float16", "bfloat16")


class PeerCollective(PlannedCollective):
    """A collective whose ranks send each other vectors, as a protocol of theirs says.

    Its base class, not for use by itself: see `NeighborAverage`, `QueuedNeighborAverage`,
    `PushSum`, `PairwiseAverage` and `ParameterServer`, whose methods these are.

    Each rank has a model: at first what it gave, a vector or list of vectors; a call publishes what
    the application has changed of what it last got, and returns a model. A change that is not
    finite is left out. Halves (float16, bfloat16) are kept and sent in single precision.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
    """

    # The engine takes the application's arrays as they are, since none is of halves.
    _takes_blocks = True

    def __init__(self, comm, like, plan: Callable, **options):
        """Make one; collective.

        Args:
            comm, like: those of `GroupAllreduce`.
            plan: function that checks the arguments of a method, and returns what must not differ
                between ranks, by name, and what makes the protocol from a `Mailbox`. It may raise
                TypeError or ValueError.
            **options: engine, transport, stall, abort, log_level of `GroupAllreduce`; the transport
                has no effect, since peers send messages.
        """
        self._single = not isinstance(like, (list, tuple))
        self._wide = []
        super().__init__(comm, like, plan, **options)

    def _allocate(self, native, node, like, given):
        messages = self.comm.Dup()
        self._communicators = (*self._communicators, messages)
        whole = any(messages.allgather(self.engine == "none"))
        mailbox = error = None
        try:
            self.native = native.PeerExchange(**self._common(node, like, given))
            mailbox = self._make_mailbox(native, messages, like, whole)
        except (MemoryError, ValueError) as problem:
            error = problem
        raise_collectively(self.comm, error)
        self.native.attach(mailbox)

    def _make_mailbox(self, native, messages, like, whole):
        """Make what sends and receives.

        Raises:
            ValueError: not all of `like` is finite.
        """
        arrays = self._listed(like)
        self._wide = [
            np.empty(array.size, np.float32) if array.dtype.name in HALVES else None
            for array in arrays
        ]
        self._takes_blocks = all(wide is None for wide in self._wide)
        wider = self._wider(arrays)
        _check_finite("like", wider)
        mailbox = native.Mailbox(messages, wider, whole)
        mailbox.attach(self._make_protocol(mailbox))
        return mailbox

    def __call__(self, vector) -> Result:
        """Publish what the application has changed in `vector`, and overwrite it by a model.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.

        Returns:
            A `Result`.

        Raises:
            ValueError, TypeError: the vector is not such; all ranks are told, and only close() is
                left.
            RankFailedError: another rank has failed.
            ClosedError: this collective is closed, or a rank that this one waits for is.
            DisagreementError: a rank that this one waits for is in `average` or so; all ranks are
                told, and only close() is left.

        An exception from a signal handler, such as KeyboardInterrupt, ends the call, but not the
        rank's part in the method: what it has changed by the next call is left out then. One in
        what all ranks do together, such as `average`, leaves only close().
        """
        return self._call(vector)

    def _call(self, vector, handover=None) -> Result:
        """Make a call, whose vector comes and goes in blocks where it is a handover's."""
        with self._guard:
            self._carry_out(self.native.call_peers, vector, handover)
            if not self._takes_blocks:
                # What rounding has changed is no change by the application.
                self.native.go_on_from(self._wider(self._listed(vector)))
            return self._result(self.version - 1)

    def _result(self, version: int) -> Result:
        return Result(version, True, version, (self.rank,), 1.0, False)

    def average(self, vector) -> None:
        """Overwrite `vector` by the average of all ranks' vectors, and leave all else as it is.

        Collective: all ranks call it between the same two calls, and none while others `join`.
        """
        with self._collectively("average()"):
            self._prepare(vector)
            self.native.average(vector, self._weight())
            self.native.pause(False)

    def synchronize(self, vector) -> None:
        """Average `vector` in place over all ranks, as the model of each; collective, no call."""
        with self._collectively("synchronize()"):
            self._prepare(vector)
            self._go_on(vector, self.version)

    def load(self, vector, version: int) -> None:
        """Go on from `vector`, which may differ between ranks, after `version` calls; collective.

        For checkpoints: all ranks call it with the same version, else they raise
        DisagreementError.

        Raises:
            ValueError: not all of `vector` is finite.
        """
        with self._collectively("load()"):
            self.native.check(vector)
            _check_finite("the vector", self._wider(self._listed(vector)))
            self.native.pause(True)
            self._load(vector, version)
            self._restart(vector, version)

    def model(self, vector) -> None:
        """Overwrite `vector` by this rank's model as it is now, and leave all else as it is."""
        with self._guard:
            self._read_model(vector)

    def _read_model(self, vector) -> None:
        self._carry_out(self.native.read_model, vector)

    def statistics(self) -> Statistics:
        """Return what this rank has done so far.

        `versions` counts the averages that its model went into, `passive` those of them that
        another rank asked for.
        """
        mailbox, statistics = self.native.mailbox, super().statistics()
        return statistics._replace(
            versions=mailbox.protocol.averagings,
            passive=mailbox.protocol.passive,
            nonfinite=mailbox.nonfinite,
            bytes_sent=statistics.bytes_sent + mailbox.bytes_sent,
        )

    def join(self, vector) -> None:
        """Make no more calls, but let those of the others go on until all ranks have joined.

        Collective; until then ranks do nothing else together. The change since the last call is in
        the average that all ranks have then, of all their models, and all have made as many calls
        as the rank that made the most.
        """
        with self.joining(vector):
            pass

    @contextlib.contextmanager
    def joining(self, vector):
        """Begin to join, and wait for the others only at the end of the block."""
        with self._collectively("join()"):
            self._carry_out(self.native.join_peers, vector)
            yield
            last = max(self.native.meet())
            self.native.catch_up(last)
            self._read_model(vector)
            self._go_on(vector, last)

    def _go_on(self, vector, version: int) -> None:
        """Average what all ranks have prepared, as the model of each after so many calls."""
        self.native.synchronize(vector, self._weight())
        self._restart(vector, version)

    def _prepare(self, vector) -> None:
        """Make `vector` what this rank gives to an average over all ranks."""
        self.native.pause(True)  # who waits for this rank in a call would do so for good

    def _weight(self) -> float:
        """How much what this rank gives to an average over all counts."""
        return 1.0

    @property
    def _protocol(self):
        return self.native.mailbox.protocol

    @property
    def version(self) -> int:
        """The number of this rank's next call: how many it has made, or skipped."""
        return self._protocol.calls

    @property
    def transport(self) -> str:
        """ "messages", whatever was given: what ranks send each other is in no shared memory."""
        return "messages"

    # Vectors of halves are single precision here

    def _listed(self, vector):
        return list(vector) if isinstance(vector, (list, tuple)) else [vector]

    def _wider(self, arrays):
        """Return the arrays, those of halves as copies in single precision."""
        for wide, array in zip(self._wide, arrays):
            if wide is not None:
                wide[:] = array
        return [array if wide is None else wide for wide, array in zip(self._wide, arrays)]

    def _carry_out(self, operation, vector, *arguments):
        """Call one of the engine's methods with a vector as wide as it wants, and back."""
        self.native.check(vector)
        arrays = self._listed(vector)
        operation(self._wider(arrays), *arguments)
        for wide, array in zip(self._wide, arrays):
            if wide is not None:
                array[:] = wide

    def _restart(self, vector, version):
        self.native.restart(self._wider(self._listed(vector)), version)


def _check_finite(name: str, arrays) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(f"{name} is not finite: it would go into all ranks' models")
