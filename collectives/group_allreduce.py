"""Wait-avoiding group allreduce for numpy vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from collectives import device, settings
from collectives.collective import Collective, check_comm
from collectives.errors import CudaError
from collectives.settings import DEFAULT_LATE
from collectives.topology import default_group_size
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    import numpy.typing as npt
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.engine.calls import Call
    from collectives.node import Node
    from collectives.options import CollectiveOptions
    from collectives.result import Result

__all__ = ["DEFAULT_LATE", "GroupAllreduce"]


class GroupAllreduce(Collective):
    """Averages vectors in groups that change with every call, without waiting for stragglers.

    Any rank may start a version of the collective, by activating all other ranks. A rank whose
    application has not arrived takes part with its snapshot, the vector that it published last.
    Every `sync_period`-th call averages over all ranks, and waits for all of them; after it all
    ranks' vectors are bitwise equal. All ranks construct the collective together and make the same
    number of calls; a rank with fewer calls joins the others (`join`).

    Args:
        comm: mpi4py intracommunicator of the participating ranks; it is duplicated.
        like: this rank's initial vector: a 1-D contiguous numpy array, or a list of such arrays,
            which are averaged together. Dtypes (float16, bfloat16 of ml_dtypes, float32 or float64)
            and lengths are the same on all ranks. fp16 and bf16 are averaged in float32. Unless
            `wait` is "group", it is this rank's snapshot until it publishes another. Arrays on a
            CUDA device are accepted as well; then all calls take such arrays, and an argument
            `stream`: see `collectives.device`.
        group_size: largest number of ranks S in a group, 1 ≤ S ≤ comm.size; by default the paper's
            √comm.size, rounded up to a power of two.
        sync_period: number of calls τ from one average over all ranks to the next, at least 1.
        groups: "changing" with every call, or "fixed": always those of the first call, so that only
            averages over all ranks spread an update beyond its group.
        pace: "common": all ranks make the same number of calls, a rank's call t is version t, and
            every `sync_period`-th call waits for all ranks. "own": ranks make any number of calls,
            and every `sync_period`-th version averages the snapshots of all ranks, so that no rank
            waits for the calls of another (`protocols.own_pace`). A call adds its change to the
            rank's snapshot. If no version was executed or started since the rank's last call, the
            call starts one, and is timely; else it returns the snapshot. It needs wait="nobody",
            late="conserving", weights="given" and weight 1 in each call.
        keep_average: whether this rank keeps the newest average over all ranks, for
            `last_average`; with pace="own" only, and not necessarily on all ranks. It takes memory
            for one more vector, and other ranks do not execute versions for this one in shared
            memory: its progress thread does (with engine="none", its calls).
        wait: "nobody", or "group": each version waits for its members, so that no rank takes part
            passively and runs are bitwise reproducible. A vector then counts in one version only: a
            rank that has closed, or whose vector is not finite, has weight 0.
        late: what a rank that others have overtaken contributes and receives. "paper": it
            contributes its vector x', and receives (W·m + w·x') / (W + w), where m, of weight W, is
            the newest mean of its groups, and w is its own weight; if it is several versions late,
            it skips the means between, and m may be that of its last call once more. "conserving":
            the change of its vector since its last call is added to its snapshot, and the mean
            replaces the snapshot, so that no update is lost or counted twice. By default
            `DEFAULT_LATE`, "conserving".
        weights: the weight of a rank's vector. "given": the `weight` of its last call. "work": the
            sum of the `weight`s of its calls since the last average over all ranks, so that
            `weight` is the work of a call, in steps or samples. "wp": r^(τ − work), which is
            proportional to q_i = r^(T_i) / Σ r^(T_j), where T_i is how far rank i is behind the
            fastest. A rank without a call since that average has weight 0 with "work", and r^τ with
            "wp".
        contraction: r of "wp", between 0 and 1: the factor by which a call of weight 1 brings a
            model closer to the optimum.
        wire_dtype: "float16" or "bfloat16" sends float32 and float64 arrays in this dtype, with a
            half or a quarter of the bytes. It sends differences from r, the last average over all
            ranks (initially `like`, if that is the same on all ranks, else 0). The error of a
            mean m of vectors x_i with shares s_i is at most about u·(Σ s_i |x_i − r| + |m − r|),
            where u is 2⁻¹¹ or 2⁻⁸ (and 2⁻²⁴ more in float16, whose largest difference is ±65504).
            None: arrays are sent in their own dtype. It has no effect if all ranks share memory.
        only_all_ranks: indices of arrays of `like` that take part only in averages over all ranks,
            to save traffic. In other versions each rank keeps its own of them, with its changes, so
            that their sum over all ranks is conserved as that of the others is. It needs
            late="conserving".
        every: dict from indices of other arrays to numbers N of versions: those arrays take part in
            versions N − 1, 2N − 1, … and in averages over all ranks. An array must take part
            whenever a later one does: periods multiply along the list, then come arrays of
            `only_all_ranks`; array 0 takes part in every version.
        leased: indices of arrays, in a row, whose sum over all ranks is of parts that ranks tell by
            `lease`; with pace="own" only. It takes memory for one more of these arrays.
        by_value: indices of arrays that are averaged by value rather than by changes, such as
            variances: each call's array replaces that of the rank's snapshot, so that no rank gets
            anything outside the range of values that ranks have given. Updates to these arrays are
            not conserved: a late rank's values take the place of the mean that it would have got.
            They are sent in their own dtype, and none may be in `leased`. With late="paper" all
            arrays are averaged by value.
        **options: see `CollectiveOptions`.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        group_size, sync_period, groups, pace, keep_average, wait, late: as given or by default.
        weights, contraction, wire_dtype, engine: as given or by default.

    Raises:
        ValueError, TypeError: an argument is invalid on some rank; on all ranks.
        RuntimeError: memory cannot be shared and `transport` is "shared"; the job consists of
            singletons; MPI has been finalized, or was initialized without the thread support that
            the engine needs, or before this process was forked.
        ImportError: the extensions were built for another MPI than mpi4py's.

    Source: WAGMA-SGD, sections III and IV, and V-B for fixed groups; "conserving", weights, an own
    pace and joining go beyond the paper. "wp": WP-SGD, Eq. 6.
    """

    _on_devices = True
    _shown = ("group_size", "sync_period")

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        group_size: int | None = None,
        sync_period: int = 10,
        groups: str = "changing",
        pace: str = "common",
        keep_average: bool = False,
        wait: str = "nobody",
        late: str | None = None,
        weights: str = "given",
        contraction: float = 0.9,
        wire_dtype: npt.DTypeLike | None = None,
        only_all_ranks: Sequence[int] = (),
        every: Mapping[int, int] | None = None,
        leased: Sequence[int] = (),
        by_value: Sequence[int] = (),
        **options: Unpack[CollectiveOptions],
    ):
        self._construct(
            comm,
            like,
            options,
            group_size=group_size,
            sync_period=sync_period,
            groups=groups,
            pace=pace,
            keep_average=keep_average,
            wait=wait,
            late=late,
            weights=weights,
            contraction=contraction,
            wire_dtype=wire_dtype,
            only_all_ranks=only_all_ranks,
            every=every,
            leased=leased,
            by_value=by_value,
        )

    def _construct(
        self,
        comm: MPI.Intracomm,
        like: Any,
        options: Mapping[str, Any],
        *,
        summing: bool = False,
        draws: bool = False,
        **given: Any,
    ) -> None:
        """Agree on the arguments with the other ranks, and build this rank's part; collective.

        Args:
            options: see `CollectiveOptions`.
            summing: whether vectors are sums of contributions (`PartialAllreduce`).
            draws: whether each version is started by a rank drawn with `seed`.
            given: the constructor's other arguments, and those of `PartialAllreduce`.
        """
        self._summing, self._draws = summing, draws
        if given["group_size"] is None:
            check_comm(comm)
            given["group_size"] = default_group_size(comm.size)
        given["late"] = DEFAULT_LATE if given["late"] is None else given["late"]
        given["wire_dtype"] = settings.name_of_dtype(given["wire_dtype"])
        super()._construct(comm, like, options, **given)

    def _argument_error(self, comm: MPI.Intracomm, given: dict[str, Any]) -> Exception | None:
        return settings.group_error(comm, given) or (
            settings.periods_error(given)
            or settings.lease_error(given)
            or settings.by_value_error(given)
        )

    def _build(self, native: Any, comm: MPI.Intracomm, like: Any, given: dict[str, Any]) -> None:
        self.group_size, self.sync_period = int(given["group_size"]), int(given["sync_period"])
        self.groups, self.wait, self.late = given["groups"], given["wait"], given["late"]
        self.pace, self.keep_average = given["pace"], given["keep_average"]
        self.weights, self.contraction = given["weights"], given["contraction"]
        self.wire_dtype = given["wire_dtype"]
        self._leases = settings.leased_of(given) is not None
        super()._build(native, comm, like, given)

    def _allocate(self, native: Any, node: Node, like: Any, given: dict[str, Any]) -> None:
        sharing = self._share(
            node,
            given["transport"],
            lambda sharing: self._make(native, node, like, given, sharing),
        )
        travels = not (sharing and node.elsewhere is None)
        if self.wire_dtype and travels and len(set(self.comm.allgather(digest(like)))) == 1:
            self.native.compress_from_initial()

    def _make(
        self, native: Any, node: Node, like: Any, given: dict[str, Any], sharing: bool
    ) -> Exception | None:
        """Make this rank's part; return the error if there is no memory for it."""
        try:
            self.native = native.GroupVersions(
                **self._common(node, like, given),
                group_size=self.group_size,
                sync_period=self.sync_period,
                fixed=self.groups == "fixed",
                own_pace=self.pace == "own",
                keep_average=self.keep_average,
                passive=self.wait == "nobody",
                late="sums" if self._summing else self.late,
                weighing=settings.weighing(self.weights, self.contraction, self.sync_period),
                drawing_seed=given["seed"] if self._draws else None,
                array_periods=settings.periods_of(given),
                leased=settings.leased_of(given),
                by_value=given.get("by_value", ()),
                wire_dtype=None if sharing and node.elsewhere is None else self.wire_dtype,
                sharing=sharing,
                initial=self._initial(None),
            )
        except (CudaError, MemoryError) as error:
            return error
        return None

    def __call__(
        self,
        vector: Vector,
        *,
        weight: float = 1.0,
        work: float = 1.0,
        stream: Stream | None = None,
    ) -> Result:
        """Average `vector` in place, as this rank's next version.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            weight: weight of this vector in every average, or the work since the last call
                (`weights`), at least 0; for batches of unequal sizes.
            work: what this call adds to `total_calls` with pace="own", at least 0.
            stream: the stream on which arrays on a CUDA device are ready and will be used next; see
                `collectives.device`.

        Returns:
            A `Result`: version, timely, source, group, weight, synchronized.

        Raises:
            ValueError, TypeError: the vector or weight is invalid; all ranks are told, and only
                close() is allowed after it.
            RankFailedError: another rank has failed, by such an error or in a `with` block.
            ClosedError: this collective is closed, or the call is synchronous and other ranks are
                closing.
            DisagreementError: the call is synchronous and other ranks are in a different operation.

        An exception from a signal handler, such as KeyboardInterrupt, may leave `vector` partly
        averaged; the version continues in the background with the contribution. If another rank's
        process is stopped during the exchange for more than a second, its data may still be written
        to `vector` later.
        """
        weight = self._weight(weight, work)
        if self._copies is None and stream is None:
            return self.native.call(vector, weight)
        return device.begin(self, "call", vector, weight, stream)

    def start(
        self,
        vector: Vector,
        *,
        weight: float = 1.0,
        work: float = 1.0,
        stream: Stream | None = None,
    ) -> Call:
        """Begin a call without blocking, and return a handle with `test()` and `wait()`.

        Neither read nor change `vector` until one of them has reported completion; the next call or
        collective operation completes the call as well. `wait()` returns the `Result`.
        """
        weight = self._weight(weight, work)
        if self._copies is None and stream is None:
            return self.native.start(vector, weight)
        return device.begin(self, "start", vector, weight, stream)

    def _weight(self, weight: float, work: float) -> float:
        """Return what the engine takes as a call's weight: its work, at the ranks' own pace.

        If one of them cannot be given at this pace, tell all ranks, and raise.
        """
        if self.pace == "common" and work == 1:  # at most calls, which are short
            return weight
        if why_not := self._pace_refuses(weight, work):
            self._refuse(why_not)
        return 1.0 if work == 1 else self._checked(work, "work")

    def _pace_refuses(self, weight: float, work: float) -> str | None:
        """Return why one of them cannot be given at this pace, None if both can."""
        if self.pace == "common":
            if work == 1:
                return None
            return f"work is {work!r} with pace 'common', which counts calls only"
        return None if weight == 1 else f"weight is {weight!r} with pace 'own', not 1"

    def _checked(self, number: float, name: str) -> float:
        """Return a number that is at least 0; else tell all ranks, and raise."""
        try:
            return settings.checked_weight(number, name)
        except (TypeError, ValueError) as error:
            self.fail(error)
            raise

    def _refuse(self, why: str) -> NoReturn:
        """Tell all ranks that an argument is invalid, and raise."""
        error = ValueError(why)
        self.fail(error)
        raise error

    def publish(self, vector: Vector, *, weight: float = 1.0, stream: Stream | None = None) -> None:
        """Replace this rank's snapshot without taking part in a version.

        Under the conserving rule the change of `vector` since the application's last call or
        publication is added to the snapshot. Publishing waits at most for an exchange in progress.
        If `wait` is "group", the snapshot counts only if this rank closes before its next call,
        and then in one version.
        """
        weight = self._weight(weight, 0.0 if self.pace == "own" else 1.0)
        with device.fetched(self, vector, stream, changes=False) as vector:
            self.native.publish(vector, weight)

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Average `vector` in place over all ranks now; collective. It is not a version.

        Each rank has the weight of its last call.
        """
        with device.fetched(self, vector, stream) as vector:
            self.native.synchronize(vector)

    def average(
        self, vector: Vector, *, weight: float | None = None, stream: Stream | None = None
    ) -> None:
        """Overwrite `vector` by what `synchronize` would return, and change nothing else.

        Collective: all ranks call it between the same two calls. A rank's default weight is that of
        its last call.
        """
        with device.fetched(self, vector, stream) as vector:
            self.native.average(vector, weight)

    def load(
        self,
        vector: Vector,
        version: int,
        *,
        total: float = 0.0,
        stream: Stream | None = None,
    ) -> None:
        """Continue from `vector`, which may differ between ranks, with call number `version`.

        For checkpoints. Collective: all ranks call it between the same two calls, with the same
        version; otherwise they raise DisagreementError. With pace="own" the version is that of all
        ranks, `executed`.

        Args:
            total: with pace="own", `total_calls` to continue with, the same on all ranks.
        """
        count = self._checked(total, "total") / self.size
        if self.pace == "common" and count:
            self._refuse("total is given with pace 'common', which counts calls only")
        with device.fetched(self, vector, stream) as vector:
            self._load(vector, version, count)

    def snapshot(self, vector: Vector, *, stream: Stream | None = None) -> int:
        """Overwrite `vector` by this rank's snapshot, for a checkpoint; collective.

        It is what the rank contributes to averages; the vector that its last call returned may be
        older. All ranks first execute every version that any has started, so the sum of their
        snapshots is the initial one and all published changes. With pace="own" only.

        To continue from it, `load` the snapshot, with the version returned, and `rebase` to the
        vector of the last call, which is saved as well.

        Returns:
            The number of versions executed, the same on all ranks.

        Raises:
            ValueError: with pace="common".
        """
        with device.fetched(self, vector, stream) as vector:
            self._check_own_pace("snapshot")
            return self.native.save(vector)

    def rebase(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Continue from `vector`, and keep the snapshot: the next change is relative to `vector`.

        Not collective. With pace="own" only.

        Raises:
            ValueError: with pace="common".
        """
        with device.fetched(self, vector, stream, changes=False) as vector:
            self._check_own_pace("rebase")
            self.native.rebase(vector)

    def lease(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Tell this rank's part of the `leased` arrays, which counts only while it publishes.

        Not collective. If the rank then publishes nothing for 4 `sync_period` versions, its engine
        subtracts the part from its snapshot, and adds it again before the next publication. So
        the sum over all ranks is that of the parts of those that go on. It waits at most for an
        exchange in progress; `load` and `join` end the lease.

        Args:
            vector: array, or list of arrays, with the dtypes and lengths of `like`: the part is in
                the leased arrays, and the others are not read.

        Raises:
            ValueError: the collective was made without `leased`, or with pace="common".
        """
        with device.fetched(self, vector, stream, changes=False) as vector:
            if not self._leases:
                self._refuse("lease() needs a collective made with leased arrays")
            self.native.lease(vector)

    def _check_own_pace(self, name: str) -> None:
        if self.pace != "own":
            self._refuse(f"{name}() needs pace 'own', in which ranks have a snapshot apart")

    def last_average(
        self, vector: Vector, *, stream: Stream | None = None
    ) -> tuple[int, float] | None:
        """Overwrite `vector` by the newest average over all ranks that this rank has.

        Not collective: it needs `keep_average`, and no communication; it waits at most for an
        exchange in progress. All ranks had this vector, bit for bit, as their snapshots.

        Returns:
            The newest version in the average, and `total_calls` as of then; None, with `vector`
            unchanged, if there was no average over all ranks yet. `synchronize` and `join` are
            averages as well, of what was published after that version.

        Raises:
            ValueError: without `keep_average`; only on this rank.
        """
        with device.fetched(self, vector, stream) as vector:
            if not self.keep_average:
                raise ValueError("last_average() needs a collective made with keep_average=True")
            kept = self.native.fetch_kept(vector)
        return None if kept is None else (kept[0], self._total_of(kept[1]))

    @property
    def total_calls(self) -> float:
        """The calls that all ranks have made together, or the sum of their `work`.

        With pace="own" those whose change was published before the newest average over all ranks
        that this rank knew of when it last called: the same on all ranks for the same average. A
        change that is not finite does not count. With pace="common" this rank's calls, times the
        ranks.
        """
        if self.pace == "common":
            return float(self.size * self.version)
        return self._total_of(self.native.mean_count)

    def _total_of(self, mean: float) -> float:
        """Return the sum of all ranks' counts; their mean is rounded where P is no power of two."""
        return round(mean * self.size, 6)

    def join(self, vector: Vector, *, stream: Stream | None = None) -> None:
        """Make no more calls, and take part in those of the others until all ranks have joined.

        This rank then has weight 0; under the conserving rule from the next synchronization on, so
        that its updates are not lost. When all have joined, `vector` is the average over the ranks
        with the most calls and those whose weight is not yet 0. It is bitwise equal on all ranks,
        and all have the same number of calls. At the ranks' own pace all snapshots keep their
        weight. To join several collectives see `collectives.join`.
        """
        with self.joining(vector, stream=stream):
            pass

    def close(self) -> None:
        """Execute every version that any rank has started, on all ranks, and leave.

        Collective; ranks may have made different numbers of calls. To the versions of other ranks'
        calls this rank contributes its snapshot, or nothing if `wait` is "group". Closing twice has
        no effect.
        """
        super().close()

    @property
    def executed(self) -> int:
        """The number of versions executed on this rank, whichever rank started them."""
        return self.native.executed


def digest(like: Any) -> bytes:
    """Return a digest that tells whether two ranks' initial vectors are equal, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for array in like if isinstance(like, (list, tuple)) else [like]:
        digest.update(array.view("uint8"))
    return digest.digest()
