"""Averages over all ranks that any rank may start, for numpy vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives import device, settings
from collectives.collective import Collective
from collectives.errors import CudaError
from collectives.group_allreduce import digest
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    import numpy.typing as npt
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.engine.calls import Call
    from collectives.node import Node
    from collectives.options import CollectiveOptions
    from collectives.result import Result

__all__ = ["TriggeredAverage"]


class TriggeredAverage(Collective):
    """Averages a vector over all ranks when the first of them has made enough calls.

    A rank's call ends one of its steps, and usually returns at once. A rank's `sync_period`-th call
    since the last average starts the next average, and waits for all other ranks, each of which
    takes part in its next call, however many it has made. So others wait for a rank only until the
    end of its current step, and slow ranks make fewer steps between averages. After the average all
    ranks' vectors are bitwise equal. A vector that is not finite is excluded, and becomes the mean.

    Ranks need not make the same number of calls: a rank that makes no more joins the others.

    Args:
        comm, like: those of `GroupAllreduce`; the values of `like` have no effect.
        sync_period: τ, at least 1: a rank's τ-th call since the last average starts the next one.
        weights, contraction, wire_dtype: those of `GroupAllreduce`.
        **options: see `CollectiveOptions`.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        sync_period, weights, contraction, wire_dtype, engine: as given or by default.

    Raises:
        ValueError, TypeError, RuntimeError, ImportError: as `GroupAllreduce` does.

    Source: local SGD (Stich, ICLR 2019); averages of ranks that have done unequal work, started by
    the fastest: WP-SGD, Algorithm 5.
    """

    _on_devices = True
    _shown = ("sync_period", "weights")

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        sync_period: int = 10,
        weights: str = "given",
        contraction: float = 0.9,
        wire_dtype: npt.DTypeLike | None = None,
        **options: Unpack[CollectiveOptions],
    ):
        self._construct(
            comm,
            like,
            options,
            sync_period=sync_period,
            weights=weights,
            contraction=contraction,
            wire_dtype=settings.name_of_dtype(wire_dtype),
        )

    def _argument_error(self, comm: MPI.Intracomm, given: dict[str, Any]) -> Exception | None:
        return settings.period_error(given) or settings.average_error(given)

    def _build(self, native: Any, comm: MPI.Intracomm, like: Any, given: dict[str, Any]) -> None:
        self.sync_period = int(given["sync_period"])
        self.weights, self.contraction = given["weights"], given["contraction"]
        self.wire_dtype = given["wire_dtype"]
        super()._build(native, comm, like, given)

    def _allocate(self, native: Any, node: Node, like: Any, given: dict[str, Any]) -> None:
        def make(sharing: bool) -> Exception | None:
            try:
                self.native = native.TriggeredAverages(
                    **self._common(node, like, given),
                    sync_period=self.sync_period,
                    weighing=settings.weighing(self.weights, self.contraction, self.sync_period),
                    wire_dtype=None if sharing and node.elsewhere is None else self.wire_dtype,
                    sharing=sharing,
                )
            except (CudaError, MemoryError) as error:
                return error
            return None

        sharing = self._share(node, given["transport"], make)
        travels = not (sharing and node.elsewhere is None)
        if self.wire_dtype and travels and len(set(self.comm.allgather(digest(like)))) == 1:
            self.native.compress_from_initial(self._initial(like))

    def __call__(
        self, vector: Vector, *, weight: float = 1.0, stream: Stream | None = None
    ) -> Result:
        """End a step of this rank; average `vector` in place if any rank has started an average.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            weight: weight of this vector in an average, or the work since the last call
                (`weights`), at least 0.
            stream: the stream on which arrays on a CUDA device are ready and will be used next; see
                `collectives.device`.

        Returns:
            A `Result`: `synchronized` tells whether there was an average, `version` its number, or
            that of the next one.

        Raises:
            ValueError, TypeError: the vector or weight is invalid; all ranks are told, and only
                close() is allowed after it.
            RankFailedError: another rank has failed, by such an error or in a `with` block.
            ClosedError: this collective is closed, or other ranks are closing during an average.
            DisagreementError: other ranks are in average() or load() during an average.
        """
        if self._copies is None and stream is None:
            return self.native.call(vector, weight)
        return device.begin(self, "call", vector, weight, stream)

    def start(self, vector: Vector, *, weight: float = 1.0, stream: Stream | None = None) -> Call:
        """Begin a call without blocking, and return a handle with `test()` and `wait()`.

        Neither read nor change `vector` until one of them has reported completion; the next call or
        collective operation completes the call as well. `wait()` returns the `Result`.
        """
        if self._copies is None and stream is None:
            return self.native.start(vector, weight)
        return device.begin(self, "start", vector, weight, stream)

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Average `vector` in place over all ranks, as `join` does; collective, but no call."""
        self.join(vector, stream=stream)

    def average(
        self, vector: Vector, *, weight: float | None = None, stream: Stream | None = None
    ) -> None:
        """Overwrite `vector` by the mean over all ranks, and change nothing else.

        Collective: all ranks are in it at the same time, or have joined. If some may still make
        calls, call `synchronize` first. A rank's default weight is that of its last call.
        """
        with device.fetched(self, vector, stream) as vector:
            self.native.average(vector, weight)

    def load(self, vector: Vector, version: int, *, stream: Stream | None = None) -> None:
        """Continue from `vector`, which may differ between ranks, before the average `version`.

        For checkpoints. Collective: all ranks call it with the same version; otherwise they raise
        DisagreementError. Work, and calls since the last average, are counted from here.
        """
        with device.fetched(self, vector, stream) as vector:
            self._load(vector, version)

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Make no more calls, and take part in the others' averages until all ranks have joined.

        This rank's work is in the next average; after that its weight is 0. When all have joined,
        `vector` is the average over the ranks that have a weight, bitwise equal on all ranks. To
        join several collectives see `collectives.join`.
        """
        with self.joining(vector, stream=stream):
            pass

    @property
    def calls(self) -> int:
        """The number of calls of this rank."""
        return self.native.calls

    @property
    def version(self) -> int:
        """The number of the next average over all ranks."""
        return self.native.version
