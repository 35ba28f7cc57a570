"""The wait-avoiding group allreduce, for numpy vectors."""

from __future__ import annotations

import hashlib

from collectives import settings
from collectives.collective import Collective
from collectives.errors import CudaError
from collectives.settings import DEFAULT_LATE
from collectives.topology import default_group_size

__all__ = ["DEFAULT_LATE", "GroupAllreduce"]


class GroupAllreduce(Collective):
    """Averages a vector over a group of ranks that changes with every call; nobody is waited for.

    Any rank may start a version of the collective. It then reaches all other ranks, and each takes
    part with what it last published if its application is elsewhere. Every `sync_period`-th
    call is an average over all ranks that waits for everybody, after which all ranks' vectors are
    bitwise equal. All ranks construct it together and make the same number of calls; one that has
    fewer to make joins the others (`join`).

    Args:
        comm: mpi4py intracommunicator of the ranks that take part; it is duplicated.
        like: this rank's initial vector: a 1-D contiguous numpy array, or a list of such arrays
            that are averaged together, of the same dtypes and lengths on all ranks: float16,
            bfloat16 (of ml_dtypes), float32 or float64. Halves are averaged in float32. Unless
            `wait` is "group" the vector is contributed until this rank publishes. Arrays on a CUDA
            device are taken too, then by all calls, which have an argument `stream`: see
            `collectives.device`.
        group_size: largest number of ranks S that average with each other, 1 ≤ S ≤ comm.size; by
            default the paper's √comm.size, rounded up to a power of two.
        sync_period: every how many calls τ all ranks average, at least 1.
        groups: "changing" with every call, or "fixed": those of the first call for ever, so that
            only the averages over all ranks spread an update beyond them.
        wait: "nobody", or "group": each version waits for its members, so that nobody takes part
            passively and runs are bitwise repeatable. What a rank gives then counts in one version:
            one that has closed, or whose vector is not finite, has weight 0.
        late: what a rank that others have overtaken contributes and gets. "paper": its vector x',
            and (W·m + w·x') / (W + w) for the mean m, of weight W, that it missed, its own weight
            being w. "conserving": what it changed since its last call, which is added to what it
            contributes; the mean replaces that, so that no update is lost and none counted twice.
        weights: what a rank's vector weighs. "given": the `weight` of its last call. "work": the
            sum of what its calls since the last average over all ranks have given, so that `weight`
            is the work of a call, in steps or samples. "wp": r^(τ − work), which is in the same
            proportion as q_i = r^(T_i) / Σ r^(T_j), T_i being how far rank i is behind the most. By
            work, a rank that has made no call since that average has weight 0, or r^τ.
        contraction: r of "wp", between 0 and 1: by which factor one call's work of weight 1 brings
            a model closer to the optimum.
        wire_dtype: "float16" or "bfloat16" to send float32 and float64 arrays as such, at half or a
            quarter of the bytes: what travels is how they differ from r, the last average over all
            ranks (at first `like`, if that is the same on all ranks, else 0). A mean m of vectors
            x_i with shares s_i is then wrong by at most about u·(Σ s_i |x_i − r| + |m − r|), u
            being 2⁻¹¹ or 2⁻⁸ (and by 2⁻²⁴ in float16, whose largest difference is ±65504).
            None: they travel as they are. Of no effect where all ranks share memory.
        engine: "adaptive": one thread of the process serves its collectives, and sleeps when they
            are idle; "dedicated": it spins, on a core of its own; "none": no thread, others wait
            while this rank computes. Else WAGMA_ENGINE, else "adaptive"; all open collectives of a
            process have the same.
        transport: "shared": the vectors are in memory that the ranks share, which must all be on
            one node; one that computes is then not needed for what others average, not even its
            progress thread. "messages": they travel. Else WAGMA_TRANSPORT, else None: averages of
            ranks that are all on one node are in shared memory, if it has any, others by messages.
        stall: after how many seconds in which nothing has moved a waiting call logs, once, which
            ranks are missing; 0: never. Else WAGMA_STALL, else 60.
        abort: after how many such seconds, in close() too, it ends the job by MPI_Abort; 0: never.
            Else WAGMA_ABORT, else 0.
        log_level: "debug", "info", "warning" or "error", for the logger `collectives`. Else
            WAGMA_LOG_LEVEL, else that is left alone.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        group_size, sync_period, groups, wait, late, weights, contraction, wire_dtype, engine: as
            given or by default.

    Raises:
        ValueError, TypeError: on every rank alike, for what is wrong on any of them.
        RuntimeError: where no memory can be shared and `transport` asks for that; for a job of
            singletons, an MPI that has been finalized, or one that was
            initialized without the thread support that the engine needs, or before this process
            was forked.
        ImportError: the extensions were built for another MPI than mpi4py's.

    Source: WAGMA-SGD, sections III and IV, and V-B for fixed groups; "conserving", weights and
        joining go beyond the paper. "wp": WP-SGD, Eq. 6.
    """

    _on_devices = True
    _shown = ("group_size", "sync_period")

    def __init__(
        self,
        comm,
        like,
        *,
        group_size=None,
        sync_period=10,
        groups="changing",
        wait="nobody",
        late=None,
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
            group_size=group_size,
            sync_period=sync_period,
            groups=groups,
            wait=wait,
            late=late,
            weights=weights,
            contraction=contraction,
            wire_dtype=wire_dtype,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )

    def _construct(self, comm, like, *, summing=False, draws=False, **given):
        """Agree with the other ranks on what is given, and build this rank's part.

        Args:
            summing: whether vectors are sums of what ranks put in (`PartialAllreduce`).
            draws: whether one rank, drawn with `seed`, starts each version.
            given: the constructor's arguments, and those by which other classes differ.
        """
        self._summing, self._draws = summing, draws
        if given["group_size"] is None:
            given["group_size"] = default_group_size(getattr(comm, "size", 1))
        given["late"] = DEFAULT_LATE if given["late"] is None else given["late"]
        given["wire_dtype"] = settings.name_of_dtype(given["wire_dtype"])
        super()._construct(comm, like, **given)

    def _argument_error(self, comm, given):
        return settings.group_error(comm, given)

    def _build(self, native, comm, like, given):
        self.group_size, self.sync_period = int(given["group_size"]), int(given["sync_period"])
        self.groups, self.wait, self.late = given["groups"], given["wait"], given["late"]
        self.weights, self.contraction = given["weights"], given["contraction"]
        self.wire_dtype = given["wire_dtype"]
        super()._build(native, comm, like, given)

    def _allocate(self, native, node, like, given):
        sharing = self._share(
            node,
            given["transport"],
            lambda sharing: self._make(native, node, like, given, sharing),
        )
        travels = not (sharing and node.elsewhere is None)
        if self.wire_dtype and travels and len(set(self.comm.allgather(digest(like)))) == 1:
            self.native.compress_from_initial()

    def _make(self, native, node, like, given, sharing):
        """Make this rank's part; return the error where there is no memory for it."""
        try:
            self.native = native.GroupVersions(
                **self._common(node, like, given),
                group_size=self.group_size,
                sync_period=self.sync_period,
                fixed=self.groups == "fixed",
                passive=self.wait == "nobody",
                conserving=self.late == "conserving",
                summing=self._summing,
                weighing=settings.weighing(self.weights, self.contraction, self.sync_period),
                drawing_seed=given["seed"] if self._draws else None,
                wire_dtype=None if sharing and node.elsewhere is None else self.wire_dtype,
                sharing=sharing,
                initial=self._initial(None),
            )
        except (CudaError, MemoryError) as error:
            return error
        return None

    def __call__(self, vector, *, weight=1.0):
        """Average `vector` in place, as this rank's next version.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            weight: of this vector in every average it goes into, or of the work since the last
                call (`weights`), from 0 on; for batches of unequal sizes.

        Returns:
            A `Result`: version, timely, source, group, weight, synchronized.

        Raises:
            ValueError, TypeError: if the vector or weight is not such; all ranks are told, and only
                close() is left.
            RankFailedError: if another rank has failed, by such an error or in a `with` block.
            ClosedError: if this collective is closed, or this was a synchronous call and other
                ranks are closing.
            DisagreementError: if this was a synchronous call and other ranks are in another one.

        An exception from a signal handler, such as KeyboardInterrupt, may leave `vector` partly
        averaged; the version goes on without the application, with what it gave. If another rank's
        process has been stopped in the middle of the exchange for more than a second, what it then
        sends may still come into `vector`.
        """
        return self.native.call(vector, weight)

    def start(self, vector, *, weight=1.0):
        """Begin what calling would do, and return a handle with `test()` and `wait()`.

        `vector` belongs to the collective until one of them has said that the call is complete;
        the next call or collective operation completes it as well. `wait()` returns the `Result`.
        """
        return self.native.start(vector, weight)

    def publish(self, vector, *, weight=1.0):
        """Replace what this rank contributes while it is late, without taking part in a version.

        Under the conserving rule that is what it contributes so far and what `vector` changes of
        what the application last got or published. It waits for an exchange that is under way, at
        most. If `wait` is "group" nobody is late; it then counts in one version if this rank closes
        before its next call.
        """
        self.native.publish(vector, weight)

    def synchronize(self, vector):
        """Average `vector` in place over all ranks now; collective, and no version.

        Each rank's weight is that of its last call.
        """
        self.native.synchronize(vector)

    def average(self, vector, *, weight=None):
        """Overwrite `vector` by what `synchronize` would now give, and leave all else as it is.

        Collective: all ranks call it between the same two calls. A rank's weight is that of its
        last call where it gives none.
        """
        self.native.average(vector, weight)

    def load(self, vector, version):
        """Go on from `vector`, which may differ between ranks, with `version` for the next call.

        For checkpoints; collective: all ranks call it between the same two calls, with the same
        version, else they raise DisagreementError.
        """
        self._load(vector, version)

    def join(self, vector):
        """Make no more calls, but take part in those of the others until all ranks have joined.

        This rank then has weight 0; under the conserving rule, from the next synchronization on,
        so that nothing it has done is lost. When all have joined, `vector` is the average of those
        that made the most calls and of those whose weight is not yet 0, bitwise equal on all ranks,
        and all have made as many calls. To join several collectives see `collectives.join`.
        """
        with self.joining(vector):
            pass

    def close(self):
        """Execute every version that any rank has started, on all of them, and leave.

        Collective; ranks may have made different numbers of calls. To the versions of others' calls
        this rank contributes what it did last; nothing if `wait` is "group". Closing twice does
        nothing.
        """
        super().close()

    @property
    def executed(self):
        """How many versions have been executed here, whoever started them."""
        return self.native.executed


def digest(like) -> bytes:
    """Return what tells whether the initial vectors of two ranks are the same, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for array in like if isinstance(like, (list, tuple)) else [like]:
        digest.update(array.view("uint8"))
    return digest.digest()
