"""Partial collectives: the allreduce of eager-SGD, which does not wait for late ranks.

Each rank has a send buffer, to which it adds what it puts in, and a receive buffer, which says what
it has got. A version averages the send buffers of all ranks as they are when it begins, whoever of
them has come. The increment that a call returns is what the newest average has beyond the receive
buffer: so each contribution is in one increment on every rank, and a late rank's goes in with the
next version.

Source: Li, Ben-Nun, Di Girolamo, Alistarh and Hoefler, Taming unbalanced training workloads in deep
learning with partial collective operations, PPoPP 2020. In the paper a send buffer is emptied by
each version and a receive buffer overwritten, so that what a rank misses of more than one version
is lost to it; here both grow up to the next synchronization, and nothing is lost.
"""

from __future__ import annotations

import contextlib

import numpy as np

from collectives import device, process, settings
from collectives.description import Described
from collectives.group_allreduce import GroupAllreduce

__all__ = ["PartialAllreduce"]

BLOCK = 1 << 15  # elements that are passed over at a time, and stay in cache
WRITABLE = 1  # PyBUF_WRITABLE


class PartialAllreduce(Described):
    """Averages what the ranks put in over all of them, without waiting for late ones.

    A rank that calls puts its vector in, and gets back what all have put in, divided by the number
    of ranks, as far as it has not got it before. What comes too late for its version goes in with
    the next one; a late call that finds nothing new returns zeros. Every `sync_period`-th call
    waits for all ranks: then all that was put in has come out, and on every rank the sum of what
    its calls returned since the last such call is the mean of what the ranks put in. All ranks
    construct it together and make the same number of calls; one that has fewer to make joins the
    others (`join`).

    Args:
        comm: mpi4py intracommunicator of the ranks that take part; it is duplicated.
        like: what the vectors are like, whose values do not matter: a 1-D contiguous numpy array,
            or a list of such arrays, of the same dtypes and lengths on all ranks: float16,
            bfloat16 (of ml_dtypes), float32 or float64. The sums of halves are kept in float32.
        trigger: "solo": a version begins when the first rank calls it. "majority": when one rank
            does that is drawn for it, the same on all ranks, so that half of the ranks are there on
            average. While that one, or any other, is in an operation (average(), synchronize(),
            load(), join(), close()) versions begin as under "solo", so that nobody waits for a
            rank that does not come.
        sync_period: every how many calls τ all ranks wait for each other, at least 1.
        seed: of the ranks that are drawn, from 0 to 2⁶⁴ − 1.
        engine, transport, stall, abort, log_level: see `GroupAllreduce`.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        trigger, sync_period, seed, engine: as given or by default.

    Raises:
        ValueError, TypeError, RuntimeError, ImportError: as `GroupAllreduce` does.

    Source: eager-SGD (Li et al., PPoPP 2020), section 4; that nothing is lost, average(), load()
    and joining go beyond the paper.
    """

    _shown = ("trigger", "sync_period")

    def __init__(
        self,
        comm,
        like,
        *,
        trigger="solo",
        sync_period=10,
        seed=0,
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        where = "cpu"
        if device.is_on_device(like):
            where = "cuda"
            like, _ = device.adopt(self, like)  # where that fails it does again, on all ranks
        zeros = like if settings.vector_error(like) else _zeros(like)
        self._sums = _Sums(
            comm,
            zeros,
            device=where,
            trigger=trigger,
            sync_period=sync_period,
            seed=seed,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )
        self.comm, self.rank, self.size = comm, self._sums.rank, self._sums.size
        self.trigger, self.sync_period, self.seed = trigger, self._sums.sync_period, int(seed)
        self.engine = self._sums.engine
        self._single = not isinstance(like, (list, tuple))
        self._send = [zeros] if self._single else zeros
        self._receive = [np.zeros_like(array) for array in self._send]
        # What is averaged: the vector given itself, where its dtype is that of the sums.
        self._wide = [
            np.zeros_like(sums) if array.dtype != sums.dtype else None
            for array, sums in zip([like] if self._single else like, self._send, strict=True)
        ]
        self._check = _check_of(like)
        self._guard = process.native().Guard()
        self._dropped = 0
        if self.path == "staged":
            self._copies.forget_initial()

    @property
    def path(self):
        """ "host", or "staged" for vectors on devices: see `Collective`."""
        return "staged" if hasattr(self, "_copies") else "host"

    @property
    def path_reason(self):
        """Why so, in a sentence."""
        where = "averages" if self.path == "staged" else "and its vectors are"
        return f"{type(self).__name__} {where} on the host"

    def __call__(self, vector):
        """Put `vector` in, as this rank's next version, and overwrite it by the increment.

        Args:
            vector: writable array, or list of arrays, with the dtypes and lengths of `like`. One
                that is not finite, or makes the sum infinite, counts as zero.

        Returns:
            A `Result`, as of `GroupAllreduce`, with all ranks as its group; `timely` says whether
            all that this rank has put in is in the increment or was in earlier ones.

        Raises:
            ValueError, TypeError: if the vector is not such; all ranks are told, and only close()
                is left.
            RankFailedError, ClosedError, DisagreementError: as in `GroupAllreduce`.

        After an exception from a signal handler, too, only close() is left. Any exception may leave
        something else in `vector`.
        """
        with self._operation(vector) as arrays:
            self._put(arrays)
            result = self._sums(self._averaged(arrays))
            self._take(arrays)
            if result.synchronized:
                self._begin_period()
        return result

    def synchronize(self, vector):
        """Put `vector` in, and wait for all ranks: all that was put in comes out.

        Collective, and no version.
        """
        with self._operation(vector) as arrays:
            self._put(arrays)
            self._sums.synchronize(self._averaged(arrays))
            self._take(arrays)
            self._begin_period()

    def average(self, vector, *, weight=1.0):
        """Overwrite `vector` by its mean over all ranks, and leave alone what was put in.

        Collective: all ranks call it between the same two calls. Ranks that have joined, or whose
        vector is not finite, do not count. Where no rank is left that has a weight, all finite
        vectors count alike.
        """
        with self._operation(vector) as arrays:
            for array, wide in zip(arrays, self._wide, strict=True):
                if wide is not None:
                    wide[...] = array
            self._sums.native.average(self._averaged(arrays), weight)
            for array, wide in zip(arrays, self._wide, strict=True):
                if wide is not None:
                    array[...] = wide

    def join(self, vector):
        """Put `vector` in and make no more calls, but take part in those of the others.

        It ends when all ranks have joined; all have then made as many calls. From the next
        synchronization on, means are over the other ranks alone. `vector` becomes what came out in
        the last period that this rank has not got; what came out of others' synchronizations
        before is not in it.
        """
        with self.joining(vector):
            pass

    @contextlib.contextmanager
    def joining(self, vector):
        """Begin to join, and wait for the others only at the end of the block."""
        with self._operation(vector) as arrays:
            self._put(arrays)
            before = self._sums.native.synchronizations
            with self._sums.joining(self._averaged(arrays)):
                yield
            if self._sums.native.synchronizations > before + 1:
                _zero(self._receive)
            self._take(arrays)
            self._begin_period()

    def load(self, version):
        """Go on with `version` for the next call, and with nothing put in or got.

        For checkpoints, which lose nothing after a synchronization; collective: all ranks call it
        between the same two calls, with the same version, else they raise DisagreementError.
        """
        with self._guard:
            self._begin_period()
            self._sums.load(self._send[0] if self._single else self._send, version)

    def statistics(self):
        """Return the `collectives.statistics.Statistics` of this rank so far."""
        return self._sums.statistics()._replace(nonfinite=self._dropped)

    def fail(self, error):
        """Tell all ranks of this one's error: their calls raise it, and only close() is left."""
        self._sums.fail(error)

    def close(self):
        """Execute every version that any rank has started, on all of them, and leave.

        Collective; ranks may have made different numbers of calls. Closing twice does nothing.
        """
        self._sums.close()

    @property
    def native(self):
        """This rank's part, an `AllRanks` of the engine."""
        return self._sums.native

    @property
    def transport(self):
        """ "shared" where this rank shares memory with any other one, else "messages"."""
        return self._sums.transport

    @property
    def closed(self):
        """Whether this collective has been closed."""
        return self._sums.closed

    @property
    def version(self):
        """The version of the next call: how many calls this rank has made."""
        return self._sums.version

    @property
    def executed(self):
        """How many versions have been executed here, whoever started them."""
        return self._sums.executed

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._sums.__exit__(kind, error, trace)
        self.close()

    @contextlib.contextmanager
    def _operation(self, vector):
        """Check a vector and give its arrays; what goes wrong goes wrong for all ranks."""
        with self._guard, self._sums.failing_collectively():
            self._check(vector)
            yield [np.asarray(vector)] if self._single else [np.asarray(each) for each in vector]

    def _averaged(self, arrays):
        """Return what is averaged in place, as the sums are given."""
        pairs = zip(arrays, self._wide, strict=True)
        averaged = [array if wide is None else wide for array, wide in pairs]
        return averaged[0] if self._single else averaged

    def _put(self, arrays):
        """Add a vector to the send buffer, and contribute that."""
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

    def _take(self, arrays):
        """Turn the newest average into what it has beyond the receive buffer, and keep that there.

        What rounding leaves out of one increment is in the next one.
        """
        for each, receive, wide in zip(arrays, self._receive, self._wide, strict=True):
            for new, got, mean in _blocks(each, receive, each if wide is None else wide):
                np.subtract(mean, got, out=mean)
                if wide is not None:
                    new[...] = mean
                got += new

    def _begin_period(self):
        """All that was put in has come out."""
        _zero(self._send)
        _zero(self._receive)


class _Sums(GroupAllreduce):
    """The average of the ranks' sums over all of them, in which late calls get the newest one."""

    def __init__(self, comm, zeros, *, trigger, **given):
        self._construct(
            comm,
            zeros,
            summing=True,
            draws=trigger == "majority",
            trigger=trigger,
            group_size=getattr(comm, "size", None),
            groups="changing",
            wait="nobody",
            late="paper",
            weights="given",
            contraction=0.9,
            wire_dtype=None,
            **given,
        )


def _check_of(like):
    """Return what raises for a vector that is not like this one, as the engine does."""
    from collectives.memory.layout import Layout, UserVector

    single = not isinstance(like, (list, tuple))
    arrays = [like] if single else like
    layout = Layout([a.dtype.name for a in arrays], [a.size for a in arrays], single)
    return lambda vector: UserVector(vector, layout, WRITABLE)


def _zeros(like):
    """Return zeros like an array or several, halves as float32."""
    if isinstance(like, (list, tuple)):
        return [_zeros(array) for array in like]
    return np.zeros(like.size, np.float32 if like.dtype.itemsize == 2 else like.dtype)


def _zero(arrays):
    for array in arrays:
        array.fill(0)


def _blocks(*arrays):
    """Cut arrays of one length into blocks that stay in cache."""
    for begin in range(0, arrays[0].size, BLOCK):
        yield tuple(array[begin : begin + BLOCK] for array in arrays)
