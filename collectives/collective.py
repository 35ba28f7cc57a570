"""The base class of all collectives: construction, failures and closing."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from collectives import device, process, settings, survival, timeline
from collectives.agreement import is_on_all_ranks, raise_collectively, singleton_error
from collectives.description import Described
from collectives.errors import CollectiveError, CudaError
from collectives.meeting import meet
from collectives.options import CollectiveOptions
from collectives.statistics import Statistics
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from types import TracebackType

    from mpi4py import MPI
    from typing_extensions import Self

    from collectives.node import Node

__all__ = ["Collective", "check_comm"]

BETWEEN_LOOKS = 1e-4  # seconds between two tests of a barrier


class Collective(Described):
    """A collective of the ranks of a communicator; base class, not for use by itself.

    Subclasses construct `native`, this rank's part, in `_allocate`.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        engine: as given or by default.
        native: this rank's part, a `NativeCollective` of the engine.
        path: how vectors are averaged: on the "host"; "staged", on the host with copies of the
            vectors on a device; or "direct", on the device. `path_reason`: the reason, a sentence.
    """

    # Whether vectors can be averaged on a device.
    _on_devices = False
    # The `device.Copies` of its vectors, if they are on a device.
    _copies: Any = None
    # Whether the application goes on after the end of another rank's process, by `abandon`.
    _is_abandoned = False
    # Whether it compares the ranks' clocks when it is closed, for their timelines.
    _compares_clocks = False
    native: Any

    def _construct(
        self, comm: MPI.Intracomm, like: Any, options: Mapping[str, Any], **given: Any
    ) -> None:
        """Agree on the arguments with the other ranks, and build this rank's part; collective.

        Args:
            like: array or list of arrays, as they are averaged.
            options: see `CollectiveOptions`.
            given: the constructor's other arguments.
        """
        check_comm(comm)
        self._place = place = process.place_of(comm)
        native, error = _native(place)
        place.check_alone()
        given.setdefault("device", "cpu")
        if device.is_on_device(like):
            given["device"] = "cuda"
            like, problem = device.adopt(self, like)
            error = error or problem
        unknown = settings.unknown_option(type(self), CollectiveOptions, options)
        given = settings.resolve(like, options, **given)
        where = f"the constructor of {settings.shown_name(type(self))}"
        meet(comm, where, *settings.limits(given))
        with place.interrupts_held():
            try:
                self._agree(comm, like, given, error or unknown)
                self._build(native, comm, like, given)
            except BaseException as error:
                _end_job_if_alone(comm, error)
                place.release(self)
                device.discard(self, error)
                raise

    def _agree(
        self, comm: MPI.Intracomm, like: Any, given: dict[str, Any], error: Exception | None
    ) -> None:
        """Raise, on all ranks, an error in the arguments of any rank."""
        error = (
            error
            or singleton_error(self._place.world_size())
            or self._argument_error(comm, given)
            or settings.first_error(like, given)
            or self._place.thread_error(given["engine"])
            or self._place.reserve(self, given["engine"])
            or (self._place.start_engine(given["engine"]) if comm.size > 1 else None)
            or self._place.begin_timeline()
        )
        given["timeline"] = timeline.is_recording()
        raise_collectively(comm, error)
        raise_collectively(comm, settings.difference(comm, given))

    def _argument_error(self, comm: MPI.Intracomm, given: dict[str, Any]) -> Exception | None:
        """Return the error in the arguments that only this class has."""
        return None

    def _build(self, native: Any, comm: MPI.Intracomm, like: Any, given: dict[str, Any]) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.engine = given["engine"]
        settings.set_log_level(given["log_level"])
        node = self._place.node(comm)
        self._processes = node.processes
        self._communicators: tuple[MPI.Intracomm, ...] = comm.Dup(), comm.Dup()
        for communicator in self._communicators:
            survival.note(communicator)
        self._identity = comm.bcast(secrets.randbits(62))
        self.native = None
        try:
            self.path, self.path_reason = device.choose_path(self, comm, node, given)
            not_mapped = self._try_to_allocate(native, node, like, given)
            if not_mapped is not None:
                self._stage(not_mapped)
                self._allocate(native, node, self._copies.arrays, given)
            if self.path != "host":
                self._copies.forget_initial()
        except BaseException as error:
            _end_job_if_alone(comm, error)
            self.native = None  # not kept by the exception's traceback
            for communicator in self._communicators:
                communicator.Free()
            raise
        finally:
            node.free()
        self._place.add_to_timeline(self, self._communicators[0])
        self.native.listen()
        self._place.add(self, self.engine)

    def _try_to_allocate(self, *arguments: Any) -> str | None:
        """Make this rank's part; return why device memory cannot be mapped, if it cannot."""
        try:
            self._allocate(*arguments)
        except device.NotMapped as error:
            return str(error)
        return None

    def _stage(self, reason: str) -> None:
        """Fall back to averaging on the host; collective."""
        self.native = None
        self.path, self.path_reason = "staged", reason
        error = None
        try:
            self._copies.use_host()
        except (CudaError, MemoryError) as caught:
            error = caught
        raise_collectively(self.comm, error)

    def _allocate(self, native: Any, node: Node, like: Any, given: dict[str, Any]) -> None:
        """Make this rank's part, or raise on all ranks; collective."""
        raise NotImplementedError

    def _common(self, node: Node, like: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `native` that all collectives have in common."""
        single = not isinstance(like, (list, tuple))
        direct = self.path == "direct"
        return {
            "control": self._communicators[0],
            "data": self._communicators[1],
            "like": [like] if single else list(like),
            "single": single,
            "identity": self._identity,
            "cores_per_rank": node.cores_per_rank,
            "stall": given["stall"],
            "abort": given["abort"],
            "make_space": self._copies.make_space if direct else None,
            "by_messages": not direct or self._copies.by_messages,
        }

    def _initial(self, like: Any) -> Any:
        """Return the initial vector as it is averaged: on a device, or else `like`."""
        return self._copies.arrays if self.path == "direct" else like

    def _share(
        self, node: Node, asked: str | None, make: Callable[[bool], Exception | None]
    ) -> bool:
        """Make this rank's part, in memory shared with the ranks of its node if possible.

        Args:
            asked: the transport given; None: any.
            make: function that makes `native`, with shared memory or without, and returns the
                error, or None.

        Returns:
            Whether memory is shared on this node.

        Raises:
            RuntimeError, MemoryError: it cannot be made with this transport; on all ranks.
        """
        direct = self.path == "direct"
        sharing = asked != "messages" and len(node.ranks) > 1
        sharing = sharing and (not direct or self._copies.maps)
        raise_collectively(self.comm, make(sharing))
        failure = node.share(self.native.node) if sharing else None
        if direct and not self._copies.by_messages:
            raise_collectively(self.comm, device.NotMapped(failure) if failure else None)
        if asked == "shared":
            why_not = failure or node.elsewhere
            raise_collectively(
                self.comm, RuntimeError(f"transport: {why_not}") if why_not else None
            )
        if any(self.comm.allgather(failure is not None)):
            error = None
            if failure is not None:
                self.native, sharing = None, False
                error = make(sharing)
            raise_collectively(self.comm, error)
        return sharing

    def _load(self, vector: Any, version: int, *more: float) -> None:
        """Let all ranks continue from another version; collective."""
        error = settings.version_error(version)
        if error:
            self.fail(error)
            raise error
        self.native.load(vector, version, *more)

    def statistics(self) -> Statistics:
        """Return the `collectives.statistics.Statistics` of this rank so far."""
        return Statistics(*self.native.statistics())

    @property
    def _nonfinite(self) -> int:
        """That field of the statistics, for a look at it after every call."""
        nonfinite: int = self.native.nonfinite
        return nonfinite

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of this rank's `error`: their calls raise it, and they can only close."""
        if self._is_ours() and not (self.closed or self.native.broken):
            self.native.fail(process.describe(error))

    @contextlib.contextmanager
    def failing_collectively(self) -> Iterator[None]:
        """Tell all ranks of an error in the block, unless they have been told of it."""
        try:
            yield
        except CollectiveError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    @contextlib.contextmanager
    def joining(self, vector: Vector, *, stream: Stream | None = None) -> Iterator[None]:
        """Begin to join; wait for the other ranks at the end of the block.

        See `collectives.join`.

        Args:
            vector: array or list of arrays, of the same dtypes and lengths as in calls. Inside the
                block, and after an exception there until `close`, neither read nor change it.
            stream: the stream on which arrays on a CUDA device are ready and will be used next; see
                `collectives.device`.
        """
        with device.fetched(self, vector, stream) as vector:
            call = self.native.start_join(vector)
            yield
            call.wait()

    @contextlib.contextmanager
    def timeline(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Record what all ranks do in the block, for ``wagma timeline``; collective.

        At its beginning and its end the ranks wait for each other, and compare their clocks; not so
        at the end if an exception leaves the block, or if the collective has been closed in it,
        which compares them. Not for use inside `join`, which lets ranks make different numbers of
        calls: around it.

        Args:
            directory: where the files go, one for each rank, in its folder ``timeline``; the same
                directory on all ranks, in a file system that can map files.

        Raises:
            OSError: a file cannot be written.
            RuntimeError: a timeline is being recorded already.
        """
        with timeline.of_collective(self, directory):
            yield

    def close(self) -> None:
        """Complete what is in progress, and leave; collective. Closing twice has no effect."""
        if not self._is_ours():
            return
        try:
            self.native.close()
        except CollectiveError as error:
            if self.native.cannot_leave and self.size > 1 and not self._is_abandoned:
                # The others would wait for this rank forever.
                process.print_cause(error, self.rank)
                process.end_job(self.comm, 1)
            raise
        finally:  # even if a signal handler raises right after the close
            if self.native.closed:
                try:
                    self._release()
                finally:
                    device.release(self)

    def abandon(self) -> None:
        """Leave alone, after a `RankDiedError`; not collective. Closing then has no effect.

        Nothing is completed, and vectors of a call in progress may be partly averaged. Once all
        ranks have abandoned it, no rank reads or writes another's vectors any more.
        """
        if not self._is_ours() or self.native.closed:
            return
        with self._place.interrupts_held():
            self.native.abandon()
            if self._place.remove(self):
                if self.path == "direct":
                    self.native.node.unmap()
                self._place.unmap_windows()
                for communicator in self._communicators:
                    communicator.Free()
        device.release(self)

    def _release(self) -> None:
        """Release what the closed collective has in this process."""
        with self._place.interrupts_held():
            if self._place.remove(self):
                self._let_go()
                self._place.unmap_windows()
                if self._compares_clocks:
                    timeline.compare_clocks(self._communicators[0])
                for communicator in self._communicators:
                    communicator.Free()

    def _let_go(self) -> None:
        """Unmap other ranks' device memory, so that each rank may free its own; collective.

        The wait is short: all ranks have called it or are about to, also on nodes that map none.
        """
        if self.path == "direct":
            self.native.node.unmap()
            all_have = self._communicators[0].Ibarrier()
            while not all_have.Test():
                time.sleep(BETWEEN_LOOKS)

    @property
    def transport(self) -> str:
        """ "shared" if this rank shares memory with any other, else "messages"."""
        return "shared" if self.native.node.in_use else "messages"

    @property
    def on_host(self) -> Any:
        """The average of the last call, if it was made on the host for arrays on a device.

        The host's copy: a 1-D numpy array, or list of arrays, with the dtypes of the vector, to be
        read before the next call; None if vectors are numpy arrays, or averaged on devices. The
        result of a call without a partner may still be in transfer.
        """
        return self._copies.on_host if self.path == "staged" else None

    @property
    def closed(self) -> bool:
        """Whether this collective has been closed."""
        return self.native.closed

    @property
    def version(self) -> int:
        """The version of the next call, which is the number of calls of this rank."""
        return self.native.version

    def _is_ours(self) -> bool:
        """Return whether this process, not its parent, constructed the collective."""

        return self.native.pid == os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _is_failure(error) and self.size > 1 and not self.closed and self._is_ours():
            # Closing waits for the other ranks, and the interpreter prints only after that.
            self._place.print_cause(error, self.rank)
            self._place.fail(error)
        self.close()


def _end_job_if_alone(comm: MPI.Intracomm, error: BaseException) -> None:
    """End the job if memory or MPI fails on this rank only, while others wait for it."""
    if process.place_of(comm) is not process or survival.is_rebuilding():
        return
    from mpi4py import MPI

    alone = isinstance(error, (MPI.Exception, MemoryError)) and not is_on_all_ranks(error)
    if alone and comm.size > 1:
        process.print_cause(error, comm.rank)
        process.end_job(comm, 1)


def _is_failure(error: BaseException | None) -> bool:
    """Return whether the error makes its block fail; sys.exit(0) and GeneratorExit do not."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def _native(place: Any) -> tuple[Any, ImportError | None]:
    """Return the engine's module, or None and the error if it cannot be loaded."""
    try:
        return place.native(), None
    except ImportError as error:
        return None, error


def check_comm(comm: Any) -> None:
    """Raise if the communicator is invalid; the ranks cannot agree on this error through it."""
    if process.place_of(comm) is not process:
        return
    MPI = process.load_mpi()
    process.check_not_forked()
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalized: collectives must be made before that")
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is COMM_NULL: this process is not in the communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is of type {type(comm).__name__}, not an mpi4py intracommunicator")
