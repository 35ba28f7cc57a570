"""Partial collectives: the allreduce of eager-SGD, which does not wait for stragglers.

Each rank has a send buffer, to which it adds its contributions, and a receive buffer, to which it
adds its results. A version averages the send buffers of all ranks as they are when it begins,
whichever ranks have arrived. A call returns the newest average minus the receive buffer. So each
contribution is in one call's result on every rank; that of a late rank is in the next version.

Source: Li, Ben-Nun, Di Girolamo, Alistarh and Hoefler, Taming unbalanced training workloads in deep
learning with partial collective operations, PPoPP 2020. In the paper each version empties the send
buffer and overwrites the receive buffer, so a rank that misses more than one version loses the
first of them; here both grow until the next synchronization, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import device, process, settings
from collectives.agreement import raise_collectively
from collectives.description import Described
from collectives.group_allreduce import GroupAllreduce
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from types import TracebackType

    from mpi4py import MPI
    from typing_extensions import Self, Unpack

    from collectives.options import CollectiveOptions
    from collectives.result import Result
    from collectives.statistics import Statistics

__all__ = ["PartialAllreduce"]

BLOCK = 1 << 15  # elements processed at a time, which stay in cache
LARGEST_HALF = 65504.0  # of fp16; bf16 has the range of the sums
WRITABLE = 1  # PyBUF_WRITABLE


class PartialAllreduce(Described):
    """Averages the ranks' contributions over all ranks, without waiting for stragglers.

    A call contributes its vector, and returns the contributions of all ranks that it has not
    returned yet, divided by the number of ranks. A contribution that is too late for its version is
    in the next one; a late call for which there is nothing new returns zeros. Every
    `sync_period`-th call waits for all ranks. After it, the vectors returned since the last such
    call add up to the mean of the contributions, on every rank. All ranks construct the collective
    together and make the same number of calls; a rank with fewer calls joins the others (`join`).

    A result of fp16 is limited to ±65504, and the next ones have the rest; only one that waits for
    all ranks overflows to infinity, as no other has what is left.

    Args:
        comm: mpi4py intracommunicator of the participating ranks; it is duplicated.
        like: an example of the vectors, whose values have no effect: a 1-D contiguous numpy array,
            or a list of such arrays, of the same dtypes and lengths on all ranks: float16, bfloat16
            (of ml_dtypes), float32 or float64. Sums of fp16 and bf16 are kept in float32.
        trigger: "solo": a version begins when the first rank calls. "majority": it begins with the
            call of a rank drawn for it, the same on all ranks; on average half of the ranks have
            arrived then. While any rank is in another operation (average(), synchronize(), load(),
            join(), close()), versions begin as with "solo", so that no rank waits for one that does
            not arrive.
        sync_period: number of calls τ from one call that waits for all ranks to the next, at least
            1.
        seed: seed of the ranks drawn, from 0 to 2⁶⁴ − 1.
        **options: see `CollectiveOptions`.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        trigger, sync_period, seed, engine: as given or by default.

    Raises:
        ValueError, TypeError, RuntimeError, ImportError: as `GroupAllreduce` does.

    Source: eager-SGD (Li et al., PPoPP 2020), section 4; that nothing is lost, average(), load()
    and joining go beyond the paper.
    """

    # The `device.Copies` of its vectors, if they are on a device.
    _copies: Any = None
    _shown = ("trigger", "sync_period")

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        trigger: str = "solo",
        sync_period: int = 10,
        seed: int = 0,
        **options: Unpack[CollectiveOptions],
    ):
        where = "cpu"
        given: Any = like
        if device.is_on_device(like):
            where = "cuda"
            given, _ = device.adopt(self, like)  # `_Sums` raises its error, on all ranks
        try:
            self._construct(
                comm,
                given,
                options,
                device=where,
                trigger=trigger,
                sync_period=sync_period,
                seed=seed,
            )
        except BaseException as caught:
            device.discard(self, caught)
            raise

    def _construct(
        self, comm: MPI.Intracomm, given: Any, options: CollectiveOptions, **settled: Any
    ) -> None:
        zeros: Any = given
        error: Exception | None = None
        if not settings.vector_error(given):
            try:
                zeros = _zeros(given)
            except MemoryError as caught:  # raised on all ranks below
                error = caught
        self._sums = _Sums(comm, zeros, options, **settled)
        self.comm, self.rank, self.size = comm, self._sums.rank, self._sums.size
        self.trigger, self.sync_period = settled["trigger"], self._sums.sync_period
        self.seed, self.engine = int(settled["seed"]), self._sums.engine
        try:
            self._allocate(given, zeros)
        except MemoryError as caught:
            error = error or caught
        try:
            raise_collectively(comm, error)
        except MemoryError:
            self._sums.close()
            raise
        if self.path == "staged":
            self._copies.forget_initial()

    def _allocate(self, given: Any, zeros: Any) -> None:
        """Allocate this rank's send and receive buffers."""
        self._single = not isinstance(given, (list, tuple))
        self._send = [zeros] if self._single else zeros
        self._receive = [np.zeros_like(array) for array in self._send]
        # The arrays that are averaged; None: the vector's own, if it has the dtype of the sums.
        self._wide = [
            np.zeros_like(sums) if array.dtype != sums.dtype else None
            for array, sums in zip([given] if self._single else given, self._send, strict=True)
        ]
        self._check = _check_of(given)
        self._guard = process.place_of(self.comm).native().Guard()
        self._dropped = 0

    @property
    def path(self) -> str:
        """ "host", or "staged" for vectors on devices: see `Collective`."""
        return "host" if self._copies is None else "staged"

    @property
    def on_host(self) -> Any:
        """As `Collective.on_host`: a 1-D array or list of arrays with the dtypes of the vector."""
        return self._copies.on_host if self.path == "staged" else None

    @property
    def path_reason(self) -> str:
        """The reason for `path`, a sentence."""
        where = "averages" if self.path == "staged" else "and its vectors are"
        return f"{type(self).__name__} {where} on the host"

    def __call__(self, vector: Vector, *, stream: Stream | None = None) -> Result:
        """Contribute `vector`, as this rank's next version, and overwrite it by the result.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`. It
                counts as zero if it is not finite, or makes the sum infinite.
            stream: the stream on which arrays on a CUDA device are ready and will be used next; see
                `collectives.device`.

        Returns:
            A `Result`, as of `GroupAllreduce`, with all ranks as its group; `timely` tells whether
            all contributions of this rank are in this result or earlier ones.

        Raises:
            ValueError, TypeError: the vector is invalid; all ranks are told, and only close() is
                allowed after it.
            RankFailedError, ClosedError, DisagreementError: as in `GroupAllreduce`.

        Only close() is allowed after an exception from a signal handler, too. After any exception
        the content of `vector` is undefined.
        """
        with self._operation(vector, stream) as arrays:
            self._put(arrays)
            result = self._sums(self._averaged(arrays))
            self._take(arrays, last=result.synchronized)
            if result.synchronized:
                self._begin_period()
        return result

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Contribute `vector`, and wait for all ranks: all contributions have then been returned.

        Collective. It is not a version.
        """
        with self._operation(vector, stream) as arrays:
            self._put(arrays)
            self._sums.synchronize(self._averaged(arrays))
            self._take(arrays, last=True)
            self._begin_period()

    def average(self, vector: Vector, *, weight: float = 1.0, stream: Stream | None = None) -> None:
        """Overwrite `vector` by its mean over all ranks; contributions are unaffected.

        Each rank has its `weight`, finite and at least 0.

        Collective: all ranks call it between the same two calls. Ranks that have joined, or whose
        vector is not finite, do not count. If no remaining rank has a weight, all finite vectors
        have the same weight.
        """
        with self._operation(vector, stream) as arrays:
            for array, wide in zip(arrays, self._wide, strict=True):
                if wide is not None:
                    wide[...] = array
            self._sums.native.average(self._averaged(arrays), weight)
            for array, wide in zip(arrays, self._wide, strict=True):
                if wide is not None:
                    array[...] = wide

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Contribute `vector`, make no more calls, and take part in those of the others.

        It returns when all ranks have joined; all then have the same number of calls. From the next
        synchronization on, means are over the other ranks only. `vector` becomes the part of the
        last period's results that this rank has not received; results of earlier synchronizations
        of the others are not in it.
        """
        with self.joining(vector, stream=stream):
            pass

    @contextlib.contextmanager
    def joining(self, vector: Vector, *, stream: Stream | None = None) -> Iterator[None]:
        """Begin to join; wait for the other ranks at the end of the block."""
        with self._operation(vector, stream) as arrays:
            self._put(arrays)
            before = self._sums.native.synchronizations
            with self._sums.joining(self._averaged(arrays)):
                yield
            if self._sums.native.synchronizations > before + 1:
                _zero(self._receive)
            self._take(arrays, last=True)
            self._begin_period()

    def load(self, version: int) -> None:
        """Continue with `version` for the next call, and no contributions.

        For checkpoints, which are exact after a synchronization. Collective: all ranks call it
        between the same two calls, with the same version; otherwise they raise DisagreementError.
        """
        with self._guard:
            self._begin_period()
            self._sums.load(self._send[0] if self._single else self._send, version)

    def statistics(self) -> Statistics:
        """Return the `collectives.statistics.Statistics` of this rank so far."""
        return self._sums.statistics()._replace(left_out=self._dropped)

    @property
    def _nonfinite(self) -> int:
        return self._dropped

    def timeline(
        self, directory: str | os.PathLike[str]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which all ranks record what they do; collective.

        See `Collective.timeline`.

        Args:
            directory: where the files go, for ``wagma timeline``.
        """
        return self._sums.timeline(directory)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of this rank's `error`: their calls raise it, and they can only close."""
        self._sums.fail(error)

    def close(self) -> None:
        """Execute every version that any rank has started, on all ranks, and leave.

        Collective; ranks may have made different numbers of calls. Closing twice has no effect.
        """
        try:
            self._sums.close()
        finally:
            if self.closed:
                device.release(self)

    @property
    def native(self) -> Any:
        """This rank's part, a `NativeCollective` of the engine."""
        return self._sums.native

    @property
    def transport(self) -> str:
        """ "shared" if this rank shares memory with any other, else "messages"."""
        return self._sums.transport

    @property
    def closed(self) -> bool:
        """Whether this collective has been closed."""
        return self._sums.closed

    @property
    def version(self) -> int:
        """The version of the next call, which is the number of calls of this rank."""
        return self._sums.version

    @property
    def executed(self) -> int:
        """The number of versions executed on this rank, whichever rank started them."""
        return self._sums.executed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sums.__exit__(kind, error, trace)
        self.close()

    @contextlib.contextmanager
    def _operation(self, vector: Any, stream: Any) -> Iterator[list[np.ndarray]]:
        """Check a vector and return its arrays; an error is raised on all ranks."""
        fetched = device.fetched(self, vector, stream)
        with fetched as vector, self._guard, self._sums.failing_collectively():
            self._check(vector)
            yield [np.asarray(vector)] if self._single else [np.asarray(each) for each in vector]

    def _averaged(self, arrays: list[np.ndarray]) -> Any:
        """Return the arrays to average in place: the vector's, or those in float32 instead."""
        pairs = zip(arrays, self._wide, strict=True)
        averaged = [array if wide is None else wide for array, wide in pairs]
        return averaged[0] if self._single else averaged

    def _put(self, arrays: list[np.ndarray]) -> None:
        """Add a vector to the send buffer, and contribute the buffer."""
        with np.errstate(over="ignore", invalid="ignore"):
            finite = all(
                np.isfinite(sums + new).all()
                for each, send in zip(arrays, self._send, strict=True)
                for new, sums in _blocks(each, send)
            )
        self._dropped += not finite
        for each, send, wide in zip(arrays, self._send, self._wide, strict=True):
            for new, sums, averaged in _blocks(each, send, each if wide is None else wide):
                if finite:
                    sums += new
                averaged[...] = sums

    def _take(self, arrays: list[np.ndarray], last: bool) -> None:
        """Subtract the receive buffer from the newest average, and add the result to the buffer.

        What rounding omits from one result is in the next, and so is what exceeds fp16; in the last
        result of a period that is infinite.
        """
        for each, receive, wide in zip(arrays, self._receive, self._wide, strict=True):
            for new, got, mean in _blocks(each, receive, each if wide is None else wide):
                np.subtract(mean, got, out=mean)
                if new.dtype == np.float16 and not last:
                    np.clip(mean, -LARGEST_HALF, LARGEST_HALF, out=mean)
                if wide is not None:
                    new[...] = mean
                got += new

    def _begin_period(self) -> None:
        """Begin a period: all contributions have been returned."""
        _zero(self._send)
        _zero(self._receive)


class _Sums(GroupAllreduce):
    """The average of the ranks' sums over all ranks; late calls receive the newest one."""

    _shown_name = PartialAllreduce.__name__

    def __init__(
        self,
        comm: MPI.Intracomm,
        zeros: Any,
        options: CollectiveOptions,
        *,
        trigger: str,
        **given: Any,
    ):
        self._construct(
            comm,
            zeros,
            options,
            summing=True,
            draws=trigger == "majority",
            trigger=trigger,
            group_size=getattr(comm, "size", None),
            groups="changing",
            pace="common",
            keep_average=False,
            wait="nobody",
            late="paper",
            weights="given",
            contraction=0.9,
            wire_dtype=None,
            **given,
        )


def _check_of(like: Any) -> Callable[[Any], Any]:
    """Return a function that checks a vector against this one, and raises as the engine does."""
    from collectives.memory.layout import Layout, UserVector

    single = not isinstance(like, (list, tuple))
    arrays = [like] if single else like
    layout = Layout([a.dtype.name for a in arrays], [a.size for a in arrays], single)
    return lambda vector: UserVector(vector, layout, WRITABLE)


def _zeros(like: Any) -> Any:
    """Return zeros like one or several arrays, in float32 for fp16 and bf16."""
    if isinstance(like, (list, tuple)):
        return [_zeros(array) for array in like]
    return np.zeros(like.size, np.float32 if like.dtype.itemsize == 2 else like.dtype)


def _zero(arrays: list[np.ndarray]) -> None:
    for array in arrays:
        array.fill(0)


def _blocks(*arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Cut arrays of one length into blocks that fit the cache."""
    for begin in range(0, arrays[0].size, BLOCK):
        yield tuple(array[begin : begin + BLOCK] for array in arrays)
