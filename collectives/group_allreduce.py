"""The wait-avoiding group allreduce, for numpy vectors."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets

from collectives import process, settings
from collectives.agreement import raise_collectively
from collectives.description import Described
from collectives.errors import CollectiveError
from collectives.meeting import meet
from collectives.node import Node
from collectives.settings import DEFAULT_LATE
from collectives.statistics import Statistics
from collectives.topology import default_group_size

__all__ = ["DEFAULT_LATE", "GroupAllreduce"]


class GroupAllreduce(Described):
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
            `wait` is "group" the vector is contributed until this rank publishes.
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
        group_size, sync_period, groups, wait, late, wire_dtype, engine: as given or by default.

    Raises:
        ValueError, TypeError: on every rank alike, for what is wrong on any of them.
        RuntimeError: where no memory can be shared and `transport` asks for that; for a job of
            singletons, an MPI that has been finalized, or one that was
            initialized without the thread support that the engine needs, or before this process
            was forked.
        ImportError: the extensions were built for another MPI than mpi4py's.

    Source: WAGMA-SGD, sections III and IV, and V-B for fixed groups; "conserving", weights and
        joining go beyond the paper.
    """

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
        check_comm(comm)
        native, error = _native()
        if given["group_size"] is None:
            given["group_size"] = default_group_size(comm.size)
        given = settings.resolve(like, **given)
        where = f"the constructor of {type(self).__name__.lstrip('_')}"
        meet(comm, where, *settings.limits(given["stall"], given["abort"]))
        with process.interrupts_held():
            error = error or settings.first_error(comm, like, given)
            try:
                raise_collectively(comm, error or process.reserve(self, given["engine"]))
                raise_collectively(comm, settings.difference(comm, given))
                self._build(native, comm, like, given)
            except BaseException:
                process.release(self)
                raise

    def _build(self, native, comm, like, given):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.group_size, self.sync_period = int(given["group_size"]), int(given["sync_period"])
        self.groups, self.wait, self.late = given["groups"], given["wait"], given["late"]
        self.engine = given["engine"]
        self.wire_dtype = given["wire_dtype"]
        settings.set_log_level(given["log_level"])
        node = Node(comm)
        self._communicators = comm.Dup(), comm.Dup()
        self._identity = comm.bcast(secrets.randbits(62))
        self.native = None
        try:
            self._allocate(native, node, like, given)
        except BaseException:
            self.native = None  # not kept by the exception's traceback
            for communicator in self._communicators:
                communicator.Free()
            raise
        finally:
            node.free()
        self.native.listen()
        process.add(self, self.engine)

    def _allocate(self, native, node, like, given):
        """Make this rank's part, in memory that the ranks of its node share where they can."""
        asked = given["transport"]
        sharing = asked != "messages" and len(node.ranks) > 1
        raise_collectively(self.comm, self._make(native, node, like, given, sharing))
        error = node.share(self.native) if sharing else None
        if asked == "shared":
            why_not = error or node.elsewhere
            raise_collectively(
                self.comm, RuntimeError(f"transport: {why_not}") if why_not else None
            )
        if any(self.comm.allgather(error is not None)):
            if error is not None:
                self.native, sharing = None, False
                error = self._make(native, node, like, given, sharing)
            raise_collectively(self.comm, error)
        travels = not (sharing and node.elsewhere is None)
        if self.wire_dtype and travels and len(set(self.comm.allgather(_digest(like)))) == 1:
            self.native.compress_from_initial()

    def _make(self, native, node, like, given, sharing):
        """Make this rank's part; return the error where there is no memory for it."""
        single = not isinstance(like, (list, tuple))
        try:
            self.native = native.Collective(
                *self._communicators,
                [like] if single else list(like),
                identity=self._identity,
                single=single,
                group_size=self.group_size,
                sync_period=self.sync_period,
                fixed=self.groups == "fixed",
                passive=self.wait == "nobody",
                conserving=self.late == "conserving",
                summing=self._summing,
                drawing_seed=given["seed"] if self._draws else None,
                oversubscribed=node.oversubscribed,
                stall=given["stall"],
                abort=given["abort"],
                wire_dtype=None if sharing and node.elsewhere is None else self.wire_dtype,
                sharing=sharing,
            )
        except MemoryError as error:
            return error
        return None

    def __call__(self, vector, *, weight=1.0):
        """Average `vector` in place, as this rank's next version.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`.
            weight: of this vector in every average it goes into, from 0 on; for batches of
                unequal sizes.

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

    def average(self, vector):
        """Overwrite `vector` by what `synchronize` would now give, and leave all else as it is.

        Collective: all ranks call it between the same two calls.
        """
        self.native.average(vector)

    def load(self, vector, version):
        """Go on from `vector`, which may differ between ranks, with `version` for the next call.

        For checkpoints; collective: all ranks call it between the same two calls, with the same
        version, else they raise DisagreementError.
        """
        error = settings.version_error(version)
        if error:
            self.fail(error)
            raise error
        self.native.load(vector, version)

    def join(self, vector):
        """Make no more calls, but take part in those of the others until all ranks have joined.

        This rank then has weight 0; under the conserving rule, from the next synchronization on,
        so that nothing it has done is lost. When all have joined, `vector` is the average of those
        that made the most calls and of those whose weight is not yet 0, bitwise equal on all ranks,
        and all have made as many calls. To join several collectives see `collectives.join`.
        """
        with self.joining(vector):
            pass

    @contextlib.contextmanager
    def joining(self, vector):
        """Begin to join, and wait for the others only at the end of the block.

        `vector` belongs to the collective inside, and after an exception there until `close`, which
        completes what was begun. See `collectives.join`.
        """
        call = self.native.start_join(vector)
        yield
        call.wait()

    def statistics(self):
        """Return the `collectives.statistics.Statistics` of this rank so far."""
        return Statistics(*self.native.statistics())

    def fail(self, error):
        """Tell all ranks of this one's error: their calls raise it, and only close() is left."""
        if self._is_ours() and not (self.closed or self.native.broken):
            self.native.fail(process.describe(error))

    @contextlib.contextmanager
    def failing_collectively(self):
        """Tell all ranks of an error in the block, unless it is one that all are told of."""
        try:
            yield
        except CollectiveError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def close(self):
        """Execute every version that any rank has started, on all of them, and leave.

        Collective; ranks may have made different numbers of calls. To the versions of others' calls
        this rank contributes what it did last; nothing if `wait` is "group". Closing twice does
        nothing.
        """
        if not self._is_ours():
            return
        self.native.close()
        with process.interrupts_held():
            if process.remove(self):
                for communicator in self._communicators:
                    communicator.Free()

    @property
    def transport(self):
        """ "shared" where this rank shares memory with any other one, else "messages"."""
        return "shared" if self.native.shares else "messages"

    @property
    def closed(self):
        """Whether this collective has been closed."""
        return self.native.closed

    @property
    def version(self):
        """The version of the next call: how many calls this rank has made."""
        return self.native.version

    @property
    def executed(self):
        """How many versions have been executed here, whoever started them."""
        return self.native.executed

    def _is_ours(self):
        """Whether this process made the collective, and no fork of it."""
        return self.native.pid == os.getpid()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if _is_failure(error) and self.size > 1 and not self.closed and self._is_ours():
            # Closing waits for the other ranks, and the interpreter prints only after that.
            process.tell(error, self.rank)
            process.fail(error)
        self.close()


def _digest(like) -> bytes:
    """Return what tells whether the initial vectors of two ranks are the same, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for array in like if isinstance(like, (list, tuple)) else [like]:
        digest.update(array.view("uint8"))
    return digest.digest()


def _is_failure(error) -> bool:
    """Whether a block that ends by this ends badly; sys.exit(0) and a generator's end do not."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def _native():
    """Return the engine's module, or None and the error of a rank that cannot load it."""
    try:
        return process.native(), None
    except ImportError as error:
        return None, error


def check_comm(comm):
    """Raise for what is no communicator to work on; ranks cannot meet there to raise together."""
    from mpi4py import MPI

    process.check_not_forked()
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalized: collectives must be made before that")
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is COMM_NULL: this process is not in the communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is of type {type(comm).__name__}, not an mpi4py intracommunicator")
