"""The average over all ranks that any rank may start, for numpy vectors."""

from __future__ import annotations

from collectives import settings
from collectives.collective import Collective
from collectives.errors import CudaError
from collectives.group_allreduce import digest

__all__ = ["TriggeredAverage"]


class TriggeredAverage(Collective):
    """Averages a vector over all ranks when the first of them has made enough calls.

    Each rank's calls are steps of its own, which end at once. The `sync_period`-th of a rank since
    the last average starts the next one, and waits for all other ranks, each of which takes part in
    its next call, whatever the number of that. So a rank is waited for until the end of the step
    that it is in, and slow ranks make fewer steps from one average to the next. Afterwards all
    ranks' vectors are bitwise equal. A vector that is not finite is left out, and becomes the mean.

    Ranks need not make the same number of calls: one that makes no more joins the others.

    Args:
        comm, like: those of `GroupAllreduce`; the values of `like` do not matter.
        sync_period: with how many calls τ since the last average a rank starts the next, at least
            1.
        weights, contraction, wire_dtype: those of `GroupAllreduce`.
        engine, transport, stall, abort, log_level: those of `GroupAllreduce`.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        sync_period, weights, contraction, wire_dtype, engine: as given or by default.

    Raises:
        ValueError, TypeError, RuntimeError, ImportError: as `GroupAllreduce` does.

    Source: local SGD (Stich, ICLR 2019); averages that the fastest rank starts, of ranks that have
    done unequal work: WP-SGD, Algorithm 5.
    """

    _on_devices = True
    _shown = ("sync_period", "weights")

    def __init__(
        self,
        comm,
        like,
        *,
        sync_period=10,
        weights="given",
        contraction=0.9,
        wire_dtype=None,
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        self._construct(
            comm,
            like,
            sync_period=sync_period,
            weights=weights,
            contraction=contraction,
            wire_dtype=settings.name_of_dtype(wire_dtype),
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    def _argument_error(self, comm, given):
        return settings.period_error(given) or settings.average_error(given)

    def _build(self, native, comm, like, given):
        self.sync_period = int(given["sync_period"])
        self.weights, self.contraction = given["weights"], given["contraction"]
        self.wire_dtype = given["wire_dtype"]
        super()._build(native, comm, like, given)

    def _allocate(self, native, node, like, given):
        def make(sharing):
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

    def __call__(self, vector, *, weight=1.0):
        """End a step of this rank: average `vector` in place, if any rank has started an average.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            weight: of this vector in an average, or of the work since the last call (`weights`),
                from 0 on.

        Returns:
            A `Result`: `synchronized` says whether there was an average, `version` which one it
            was, or will be.

        Raises:
            ValueError, TypeError: if the vector or weight is not such; all ranks are told, and only
                close() is left.
            RankFailedError: if another rank has failed, by such an error or in a `with` block.
            ClosedError: if this collective is closed, or others are closing during an average.
            DisagreementError: if other ranks are in average() or load() during an average.
        """
        return self.native.call(vector, weight)

    def start(self, vector, *, weight=1.0):
        """Begin what calling would do, and return a handle with `test()` and `wait()`.

        `vector` belongs to the collective until one of them has said that the call is complete;
        the next call or collective operation completes it as well. `wait()` returns the `Result`.
        """
        return self.native.start(vector, weight)

    def synchronize(self, vector):
        """Average `vector` in place over all ranks, as `join` does; collective, and no call."""
        self.join(vector)

    def average(self, vector, *, weight=None):
        """Overwrite `vector` by the mean over all ranks, and leave all else as it is.

        Collective: all ranks are in it at a time, or have joined. Where some may still make calls,
        `synchronize` first. A rank's weight is that of its last call where it gives none.
        """
        self.native.average(vector, weight)

    def load(self, vector, version):
        """Go on from `vector`, which may differ between ranks; the next average has this number.

        For checkpoints; collective: all ranks call it with the same version, else they raise
        DisagreementError. Work, and calls since the last average, count from here on.
        """
        self._load(vector, version)

    def join(self, vector):
        """Make no more calls, but take part in the others' averages until all ranks have joined.

        What this rank has is in the next average, and has weight 0 from then on. When all have
        joined, `vector` is the average of what counts, bitwise equal on all ranks. To join several
        collectives see `collectives.join`.
        """
        with self.joining(vector):
            pass

    @property
    def calls(self):
        """How many calls this rank has made."""
        return self.native.calls

    @property
    def version(self):
        """The number of the next average over all ranks."""
        return self.native.version
