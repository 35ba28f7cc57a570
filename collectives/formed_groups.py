"""The base class of collectives whose protocol forms groups of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import device, settings
from collectives.planned import Planned, PlannedCollective
from collectives.result import Result
from collectives.statistics import Statistics
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

    from collectives.node import Node

__all__ = ["FormedGroupCollective"]


class FormedGroupCollective(PlannedCollective):
    """A collective whose ranks average in groups that a protocol forms.

    A base class, not for use by itself. A call averages a rank's vector in the groups that the
    protocol selects, one after the other. Each group overwrites it by the weighted mean of the
    members' vectors; vectors that are not finite are excluded.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        sync_every: as given.
    """

    _on_devices = True

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        plan: Callable[[], Planned],
        *,
        sync_every: int = 1,
        **options: Any,
    ):
        """Construct the collective; collective.

        Args:
            comm, like: those of `GroupAllreduce`.
            plan: function that checks the method's arguments, and returns a dict of the settings
                that must be the same on all ranks, and a function that makes a `GroupProtocol` for
                (port, rank, size).
            sync_every: number of a rank's calls from one average to the next, at least 1; the calls
                between return at once.
            **options: see `CollectiveOptions`.
        """

        def whole_plan() -> Planned:
            described, make = plan()
            period = settings.checked_integer("sync_every", sync_every, 1)
            return described | {"sync_every": period}, make

        self.sync_every = sync_every
        self._idle_rank: int | None = None
        super().__init__(comm, like, whole_plan, **options)

    def _allocate(self, native: Any, node: Node, like: Any, given: dict[str, Any]) -> None:
        groups = self.comm.Dup()
        self._communicators = (*self._communicators, groups)
        common = self._common(node, like, given)
        protocol: Any = None

        def make(sharing: bool) -> Exception | None:
            nonlocal protocol
            try:
                self.native = native.FormedGroups(groups=groups, sharing=sharing, **common)
                protocol = self._make_protocol(self.native.queue, self.rank, self.size)
                protocol.sync_every = self.sync_every
            except Exception as error:  # including those of the method's factory
                return error
            return None

        self._share(node, given["transport"], make)
        self.native.attach(protocol, self._initial(like))

    def __call__(self, vector: Vector, *, stream: Stream | None = None) -> Result:
        """Overwrite `vector` by the means of this call's groups, one after the other.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            stream: the stream on which arrays on a CUDA device are ready and will be used next; see
                `collectives.device`.

        Returns:
            A `Result`, of the last of these groups.

        Raises:
            ValueError, TypeError: the vector is invalid; all ranks are told, and only close() is
                allowed after it.
            RankFailedError: another rank has failed.
            ClosedError: this collective is closed.
            RuntimeError: this rank only runs the controller or generator; all ranks are told.

        An exception from a signal handler, such as KeyboardInterrupt, ends the call, but not this
        rank's part in its groups.
        """
        if self._copies is None and stream is None:
            return self._call(vector)
        return device.call(self, vector, stream)

    def _call(self, vector: Any, handover: Any = None) -> Result:
        """Make a call; the vector is read and written in blocks if a `Handover` provides it."""
        with self._guard:
            if not self.participates:
                error = RuntimeError(
                    f"rank {self.rank} makes no calls: it only runs the controller "
                    "(controller_only); let it join() instead"
                )
                self.fail(error)
                raise error
            return self.native.call(vector, handover)

    @property
    def _takes_blocks(self) -> bool:
        """Whether a call returns the mean as it is, so that it can be written in blocks."""
        return self.participates

    def average(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Overwrite `vector` by the average of all ranks' vectors, and change nothing else.

        Collective: a rank that has entered it waits for all ranks, and calls of other ranks do not
        wait for it meanwhile.
        """
        with device.fetched(self, vector, stream) as vector, self._collectively("average()"):
            self.native.pause(True)
            self.native.average(vector, self._weight)
            self.native.pause(False)

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Average `vector` in place over all ranks, which continue from there; collective."""
        with device.fetched(self, vector, stream) as vector, self._collectively("synchronize()"):
            self.native.pause(True)
            self._go_on_together(vector)

    def load(self, vector: Vector, version: int, *, stream: Stream | None = None) -> None:
        """Continue from `vector`, which may differ between ranks, at call `version`; collective.

        For checkpoints: all ranks call it with the same version; otherwise they raise
        DisagreementError.
        """
        with device.fetched(self, vector, stream) as vector, self._collectively("load()"):
            self.native.check(vector)
            self.native.pause(True)
            self._load(vector, version)
            self.native.go_on_from(vector)
            self.native.restart(version)
            self.native.meet()
            self.native.pause(False)

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Make no more calls, and let the others form groups without this rank until all join.

        Collective. All ranks then have the average of all vectors, and have made as many calls as
        the rank with the most.
        """
        with self.joining(vector, stream=stream):
            pass

    @contextlib.contextmanager
    def joining(self, vector: Vector, *, stream: Stream | None = None) -> Iterator[None]:
        """Begin to join; wait for the other ranks at the end of the block."""
        with device.fetched(self, vector, stream) as vector, self._collectively("join()"):
            self.native.check(vector)
            self.native.pause(True)
            yield
            self.native.restart(max(self.native.meet()))
            self._go_on_together(vector)

    def _go_on_together(self, vector: Any) -> None:
        """Average over all ranks, which have paused and continue from there."""
        self.native.add_moved(vector)
        self.native.synchronize(vector, self._weight)
        self.native.go_on_from(vector)
        self.native.pause(False)

    def statistics(self) -> Statistics:
        """Return this rank's statistics so far.

        `versions` counts the groups with this rank, `passive` those that averaged outside its
        calls.
        """
        statistics = super().statistics()
        return statistics._replace(
            left_out=self._nonfinite,
            bytes_sent=statistics.bytes_sent + self.native.group_bytes,
        )

    @property
    def _nonfinite(self) -> int:
        nonfinite: int = self.native.nonfinite + self.native.group_nonfinite
        return nonfinite

    @property
    def participates(self) -> bool:
        """Whether this rank makes calls: false if it only runs the controller."""
        return self.rank != self._idle_rank

    @property
    def _weight(self) -> float:
        """This rank's weight in an average over all ranks."""
        return float(self.participates)

    @property
    def met(self) -> np.ndarray:
        """The ranks that this rank has averaged with: float64 array of shape (ranks,).

        For each rank it has the sum of 1/|S| over the groups S that contain both. The rows of all
        ranks are the sum of their groups' averaging matrices (`topology.averaging_matrix_of`).
        """
        return np.array(self.native.who_was_met)

    @property
    def version(self) -> int:
        """The number of calls of this rank."""
        return self.native.queue.protocol.calls


def checked_idle_rank(controller_only: bool, controller_rank: int, size: int) -> int | None:
    """Return the rank that makes no calls, None if all do; or raise."""
    if not isinstance(controller_only, (bool, np.bool_)):
        raise TypeError(f"controller_only is {controller_only!r}, neither True nor False")
    if controller_only and size == 1:
        raise ValueError(
            "controller_only is True in a job of 1 rank: no rank is left to make calls"
        )
    return controller_rank if controller_only else None
