"""The parts of collectives that simulated ranks have, in place of those of the engine.

They have the interface of the classes of `collectives.engine.native`, as far as trainings need it:
so the collectives, and the optimizers on top of them, are those that run over MPI. Decisions are
those of the protocols, by the methods of `wagma.simulation`, whose vectors have values.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from collectives.memory.layout import Layout
from collectives.result import Result
from wagma.simulation.wait_avoiding import GroupAveraging

if TYPE_CHECKING:
    from wagma.simulation.ranks import Communicator

__all__ = ["GroupVersions", "Part", "Place"]

AVERAGE, SYNCHRONIZE = 2, 3  # operations: see `collectives.protocols.all_ranks`


class Place:
    """Where a simulated rank lives: what `collectives.process` offers to one that is a process.

    Args:
        comm: the rank's communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def native(self) -> Any:
        """Return the classes of a rank's parts of collectives."""
        from wagma.simulation.group_parts import FormedGroups, TriggeredAverages
        from wagma.simulation.peer_parts import Mailbox, PeerExchange

        return SimpleNamespace(
            FormedGroups=FormedGroups,
            GroupVersions=GroupVersions,
            Guard=contextlib.nullcontext,
            Mailbox=Mailbox,
            PeerExchange=PeerExchange,
            TriggeredAverages=TriggeredAverages,
        )

    def node(self, comm: Communicator) -> Node:
        """Return the node of this rank."""
        return Node(comm)

    def clock(self) -> float:
        """Return the simulated time, in seconds."""
        return self.comm.ranks.now()

    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self.comm.size

    def interrupts_held(self) -> contextlib.AbstractContextManager[None]:
        """Return a block: signals arrive between turns only."""
        return contextlib.nullcontext()

    def check_alone(self) -> None:
        """Accept any number of open collectives."""

    def thread_error(self, mode: str) -> None:
        """Accept any engine mode: there is none."""

    def reserve(self, collective: Any, mode: str) -> None:
        """Accept any engine mode: there is none."""

    def start_engine(self, mode: str) -> None:
        """Start nothing: the simulation serves all."""

    def begin_timeline(self) -> None:
        """Record nothing: simulated time has no timeline."""

    def add_to_timeline(self, collective: Any, comm: Any) -> None:
        """Record nothing."""

    def release(self, collective: Any) -> None:
        """Release nothing."""

    def add(self, collective: Any, mode: str) -> None:
        """Serve nothing: the simulation does."""

    def remove(self, collective: Any) -> bool:
        """Return that the collective was served."""
        return True

    def unmap_windows(self) -> None:
        """Unmap nothing: simulated ranks are in one process."""

    def print_cause(self, error: BaseException, rank: int) -> None:
        """Print nothing: the error ends the job."""

    def fail(self, error: BaseException) -> None:
        """Tell nobody: the error ends the job."""


class Node:
    """The ranks of a simulated rank's node: see `collectives.node.Node`.

    Args:
        comm: the rank's communicator.
    """

    cores_per_rank = 2.0
    processes: ClassVar[dict[int, Any]] = {}

    def __init__(self, comm: Communicator) -> None:
        node_of = comm.ranks.job.machine.for_job(comm.size).node_of(comm.size)
        self.ranks = [rank for rank in range(comm.size) if node_of[rank] == node_of[comm.rank]]
        self.elsewhere = None if len(self.ranks) == comm.size else "there are several nodes"

    def share(self, memory: Any) -> None:
        """Let the ranks of this node use shared memory."""
        memory.in_use = True

    def free(self) -> None:
        """Free nothing."""


class Part:
    """A simulated rank's part of a collective; a base class.

    Args:
        control: the rank's `Communicator`.
        like: list of arrays, as they are averaged.
        single: whether users pass one array rather than a list.
        by_value: indices of arrays that are averaged by value.
    """

    broken = cannot_leave = False
    failure = (-1, None)

    def __init__(
        self,
        control: Communicator,
        like: list[Any],
        single: bool,
        by_value: Sequence[int] = (),
        **_: Any,
    ) -> None:
        self.ranks, self.rank, self.size = control.ranks, control.rank, control.size
        dtypes, lengths = [a.dtype.name for a in like], [a.size for a in like]
        self.layout = Layout(dtypes, lengths, single, by_value=by_value)
        self.nbytes = self.ranks.job.nbytes or sum(array.nbytes for array in like)
        self.node = SimpleNamespace(in_use=False)
        self.pid = os.getpid()
        self.closed = False

    def listen(self) -> None:
        """Do nothing: the simulation delivers what arrives."""

    def fail(self, text: str) -> None:
        """Tell nobody: an error ends the job."""

    def begin_close(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave; the ranks' vectors stay as they are."""
        self.closed = True

    def start_join(self, vector: Any) -> Any:
        """Refuse: ranks of a simulated job end together.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ranks do not join() in a simulated job")

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[Any]:
        """Begin a call in the block, and wait for its return at its end."""
        yield self.ranks.enter(self.rank)
        self.ranks.wait(self.rank)

    def average(self, vector: Any, weight: float | None = None) -> None:
        """Overwrite the vector by all ranks' average, and change nothing else."""
        self._average_all(AVERAGE, vector, weight)

    def synchronize(self, vector: Any) -> None:
        """Average over all ranks, which continue from that."""
        self._average_all(SYNCHRONIZE, vector, None)

    def _average_all(self, operation: int, vector: Any, weight: float | None) -> None:
        raise NotImplementedError

    def statistics(self) -> tuple[Any, ...]:
        """Return the fields of `collectives.statistics.Statistics`; its times are simulated."""
        simulation = self.ranks.simulation
        waited = 0.0 if simulation is None else float(simulation.waited[self.rank])
        return (*self._counts(), 0, 0, 0, waited, 0.0, 0.0)

    @property
    def nonfinite(self) -> int:
        """The field of `statistics` with that name."""
        return self._counts()[-1]

    def _counts(self) -> tuple[Any, ...]:
        """Return the fields from `calls` to `left_out`."""
        raise NotImplementedError


class Started:
    """A call that was started: `wait` returns its result.

    Args:
        part: the rank's part, in which it is the pending call.
    """

    def __init__(self, part: GroupVersions) -> None:
        self.part = part
        self.result: Result | None = None

    def wait(self) -> Result:
        """Wait until the call is complete."""
        if self.result is None:
            self.result = self.part.complete()
        return self.result


class GroupVersions(Part):
    """A rank of `collectives.GroupAllreduce`; see `collectives.engine.versions.GroupVersions`."""

    def __init__(
        self,
        control: Communicator,
        like: list[Any],
        *,
        group_size: int,
        sync_period: int,
        fixed: bool,
        own_pace: bool,
        keep_average: bool,
        passive: bool,
        late: str,
        weighing: tuple[int, float, float],
        drawing_seed: int | None,
        wire_dtype: str | None,
        sharing: bool,
        array_periods: tuple[int, ...],
        leased: tuple[int, int] | None = None,
        initial: Any = None,
        **common: Any,
    ) -> None:
        super().__init__(control, like, **common)
        self.pending: Started | None = None

        def make() -> GroupAveraging:
            return GroupAveraging(
                group_size,
                sync_period,
                self.nbytes,
                "nobody" if passive else "group",
                drawing=drawing_seed is not None,
                fixed=fixed,
                own_pace=own_pace,
                late=late,
                layout=self.layout,
                sharing=sharing,
                weighing=weighing,
                wire_dtype=wire_dtype,
                seed=drawing_seed or 0,
                array_periods=array_periods,
            )

        self.method = self.ranks.method(GroupAveraging, make)
        first = like[0] if self.layout.single else like
        self.method.initialize(self.rank, first, keep_average, leased)

    def compress_from_initial(self) -> None:
        """Send compressed vectors as differences from the initial one, which all ranks have."""
        self.method.compress_from_initial(self.rank)

    def call(self, vector: Any, weight: float) -> Result:
        """Average the vector in place, in this rank's next version or over all ranks."""
        self._complete_pending()
        with self._waiting():
            self.method.begin_call(self.rank, vector, weight)
        return self._result()

    def start(self, vector: Any, weight: float) -> Started:
        """Begin this rank's next call, and return the `Started`."""
        self._complete_pending()
        with self._waiting():
            self.method.begin_call(self.rank, vector, weight)
            self.method.run_on(self.rank)
        self.pending = Started(self)
        return self.pending

    def complete(self) -> Result:
        """Wait for the call that was started, and return its result."""
        self.pending = None
        if self.method.is_outstanding(self.rank):
            with self._waiting():
                pass
        return self._result()

    def close(self) -> None:
        """Leave; a call that was started, and that the end of time interrupts, is as it is."""
        if self.pending is not None and self.pending.result is None:
            self.pending.result = self._result()
        super().close()

    def fetch_kept(self, vector: Any) -> tuple[int, float] | None:
        """Overwrite the vector by the average that is kept; return its version and mean count."""
        if not self.method.keeps(self.rank):
            return None
        self._complete_pending()
        with self._waiting():
            self.method.begin_fetch(self.rank, vector)
        return self.method.fetched(self.rank)

    def lease(self, vector: Any) -> None:
        """Take the leased arrays of this vector as the rank's part of them."""
        self._complete_pending()
        with self._waiting():
            self.method.begin_lease(self.rank, vector)

    def _complete_pending(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def _average_all(self, operation: int, vector: Any, weight: float | None) -> None:
        self._complete_pending()
        with self._waiting():
            self.method.begin_operation(self.rank, operation, vector, weight)

    def _result(self) -> Result:
        return Result(*self.method.result_of(self.rank))

    @property
    def version(self) -> int:
        """The number of the next call."""
        return self.method.version_of(self.rank)

    @property
    def mean_count(self) -> float:
        """The mean of all ranks' counts in the newest average over all ranks."""
        return self.method.mean_count(self.rank)

    @property
    def executed(self) -> int:
        """The number of versions executed on this rank."""
        return sum(self._counts()[5])

    @property
    def synchronizations(self) -> int:
        """The number of averages over all ranks from which ranks go on."""
        return self._counts()[2]

    def _counts(self) -> tuple[Any, ...]:
        return self.method.counts_of(self.rank)
