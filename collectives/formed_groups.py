"""What collectives have in common in which something forms groups of ranks that average."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from collectives import settings
from collectives.errors import CudaError
from collectives.planned import PlannedCollective
from collectives.result import Result
from collectives.statistics import Statistics

__all__ = ["FormedGroupCollective"]


class FormedGroupCollective(PlannedCollective):
    """A collective whose ranks average in groups that a protocol of theirs forms.

    A base class, not for use by itself. In a call a rank's vector goes through the groups that the
    protocol says, one after the other, each of which overwrites it by its members' weighted mean;
    vectors that are not finite do not count in it.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        sync_every: as given.
    """

    _on_devices = True

    def __init__(self, comm, like, plan: Callable, *, sync_every: int = 1, **options):
        """Make one; collective.

        Args:
            comm, like: those of `GroupAllreduce`.
            plan: function that checks the arguments of a method, and returns what must not differ
                between ranks, by name, and a function that returns the `GroupProtocol` of a (port,
                rank, size). It may raise TypeError or ValueError.
            sync_every: in every so-manieth call a rank is in groups, from 1 on; between them calls
                return at once.
            **options: engine, transport, stall, abort, log_level of `GroupAllreduce`.
        """

        def whole_plan():
            described, make = plan()
            period = settings.checked_integer("sync_every", sync_every, 1)
            return described | {"sync_every": period}, make

        self.sync_every = sync_every
        self._idle_rank = None
        super().__init__(comm, like, whole_plan, **dict.fromkeys(settings.VARIABLES) | options)

    def _allocate(self, native, node, like, given):
        groups = self.comm.Dup()
        self._communicators = (*self._communicators, groups)
        common = self._common(node, like, given)
        protocol = None

        def make(sharing):
            nonlocal protocol
            try:
                self.native = native.FormedGroups(groups=groups, sharing=sharing, **common)
                protocol = self._make_protocol(self.native.queue, self.rank, self.size)
                protocol.sync_every = self.sync_every
            except (CudaError, MemoryError, ValueError) as error:
                return error
            return None

        self._share(node, given["transport"], make)
        self.native.attach(protocol, self._initial(like))

    def __call__(self, vector) -> Result:
        """Overwrite `vector` by the means of the groups that this call is in.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.

        Returns:
            A `Result`, of the last of these groups.

        Raises:
            ValueError, TypeError: the vector is not such; all ranks are told, and only close() is
                left.
            RankFailedError: another rank has failed.
            ClosedError: this collective is closed.
            RuntimeError: this rank does nothing but form groups; all ranks are told.

        An exception from a signal handler, such as KeyboardInterrupt, ends the call, but not this
        rank's part in its groups.
        """
        return self._call(vector)

    def _call(self, vector, handover=None) -> Result:
        """Make a call, whose vector comes and goes in blocks where it is a handover's."""
        with self._guard:
            if not self.participates:
                error = RuntimeError(
                    f"rank {self.rank} makes no calls: it is the controller's alone "
                    "(controller_only); let it join() instead"
                )
                self.fail(error)
                raise error
            return self.native.call(vector, handover)

    @property
    def _takes_blocks(self) -> bool:
        """Whether a call returns what its averages have made of the vector, and no more."""
        return self.participates

    def average(self, vector) -> None:
        """Overwrite `vector` by the average of all ranks' vectors, and leave all else as it is.

        Collective: no rank makes a call before all have come, or waits for one that has.
        """
        with self._collectively("average()"):
            self.native.pause(True)
            self.native.average(vector, self._weight)
            self.native.pause(False)

    def synchronize(self, vector) -> None:
        """Average `vector` in place over all ranks, which go on from there; collective."""
        with self._collectively("synchronize()"):
            self.native.pause(True)
            self._go_on_together(vector)

    def load(self, vector, version: int) -> None:
        """Go on from `vector`, which may differ between ranks, after `version` calls; collective.

        For checkpoints: all ranks call it with the same version, else they raise
        DisagreementError.
        """
        with self._collectively("load()"):
            self.native.check(vector)
            self.native.pause(True)
            self._load(vector, version)
            self.native.go_on_from(vector)
            self.native.restart(version)
            self.native.meet()
            self.native.pause(False)

    def join(self, vector) -> None:
        """Make no more calls, and let the others form groups without this rank until all join.

        Collective. All ranks then have the average of all their vectors, and have made as many
        calls as the rank that made the most.
        """
        with self.joining(vector):
            pass

    @contextlib.contextmanager
    def joining(self, vector):
        """Begin to join, and wait for the others only at the end of the block."""
        with self._collectively("join()"):
            self.native.check(vector)
            self.native.pause(True)
            yield
            self.native.restart(max(self.native.meet()))
            self._go_on_together(vector)

    def _go_on_together(self, vector) -> None:
        """Average over all ranks, which have paused and go on from there."""
        self.native.add_moved(vector)
        self.native.synchronize(vector, self._weight)
        self.native.go_on_from(vector)
        self.native.pause(False)

    def statistics(self) -> Statistics:
        """Return what this rank has done so far.

        `versions` counts the groups that it was in, `passive` those outside of its calls.
        """
        statistics = super().statistics()
        return statistics._replace(bytes_sent=statistics.bytes_sent + self.native.group_bytes)

    @property
    def participates(self) -> bool:
        """Whether this rank makes calls: not the controller's, where that does nothing else."""
        return self.rank != self._idle_rank

    @property
    def _weight(self) -> float:
        """How much this rank counts in an average over all."""
        return float(self.participates)

    @property
    def met(self) -> np.ndarray:
        """Whom this rank has averaged with: float64 array of shape (ranks,).

        Of each rank it has the sum of 1/|S| over the groups S that both were in. All ranks' rows
        are the sum of their groups' averaging matrices (`topology.averaging_matrix_of`).
        """
        return np.array(self.native.who_was_met)

    @property
    def version(self) -> int:
        """How many calls this rank has made."""
        return self.native.queue.protocol.calls


def checked_idle_rank(controller_only, controller_rank: int, size: int) -> int | None:
    """Return the rank that makes no calls, None for none; or raise."""
    if not isinstance(controller_only, (bool, np.bool_)):
        raise TypeError(f"controller_only is {controller_only!r}, neither True nor False")
    if controller_only and size == 1:
        raise ValueError("controller_only is True in a job of 1 rank: none is left to make calls")
    return controller_rank if controller_only else None
