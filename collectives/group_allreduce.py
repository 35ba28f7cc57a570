"""The wait-avoiding group allreduce, for numpy vectors."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager

import numpy as np

from collectives.agreement import name_ranks, raise_together, singleton_error

__all__ = ["DEFAULT_LATE", "GroupAllreduce"]

DEFAULT_LATE = "conserving"

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
MOST_OPEN = 256
ENGINE_MODES = ("adaptive", "dedicated", "none")

_engine = None
_open: dict[int, GroupAllreduce] = {}


class GroupAllreduce:
    """Averages a vector over a group of ranks that changes with every call; nobody is waited for.

    Any rank may start a version of the collective. It then reaches all other ranks, and each takes
    part with what it last published if its application is elsewhere. Every `sync_period`-th
    call is an average over all ranks that waits for everybody, after which all ranks' vectors are
    bitwise equal. All ranks construct it together and make the same number of calls.

    Args:
        comm: mpi4py communicator of the ranks that take part; it is duplicated.
        like: this rank's initial vector, a 1-D contiguous float32 or float64 numpy array, of the
            same dtype and length on all ranks. It is contributed until this rank publishes.
        group_size: largest number of ranks S that average with each other, 1 ≤ S ≤ comm.size.
        sync_period: every how many calls τ all ranks average, at least 1.
        wait: "nobody", or "group": each version waits for its members, so that nobody takes part
            passively and runs are bitwise repeatable.
        late: what a rank that others have overtaken contributes and gets. "paper": its vector x',
            and (W·m + x') / (W + 1) for the mean m of W ranks that it missed. "conserving":
            what it changed since its last call, which is added to what it contributes; the
            mean replaces that, so that no update is lost and none counted twice.

    Raises:
        ValueError, TypeError: on every rank alike, for what is wrong on any of them.
        RuntimeError: for a job of singletons, or an MPI that was initialised without the thread
            support that the engine needs.

    Source: WAGMA-SGD, sections III and IV; "conserving" goes beyond the paper.
    """

    def __init__(self, comm, like, *, group_size, sync_period=10, wait="nobody", late=None):
        settings = {
            "group_size": group_size,
            "sync_period": sync_period,
            "wait": wait,
            "late": DEFAULT_LATE if late is None else late,
            "WAGMA_ENGINE": os.environ.get("WAGMA_ENGINE", "adaptive"),
            "length": getattr(like, "size", None),
            "dtype": str(getattr(like, "dtype", None)),
        }
        with _interrupts_held():
            raise_together(comm, _first_error(comm, like, settings))
            raise_together(comm, _difference(comm, settings))
            self._build(comm, like, settings)

    def _build(self, comm, like, settings):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.group_size, self.sync_period = (
            int(settings["group_size"]),
            int(settings["sync_period"]),
        )
        self.wait, self.late = settings["wait"], settings["late"]
        self._communicators = comm.Dup(), comm.Dup()
        self._pid = os.getpid()
        self._collective = error = None
        crowded = _crowded(comm)
        try:
            self._collective = _native().Collective(
                *self._communicators,
                like,
                self.group_size,
                self.sync_period,
                self.wait == "nobody",
                self.late == "conserving",
                crowded,
            )
        except MemoryError as caught:
            error = caught
        raise_together(comm, error)
        self._collective.start()
        _start(self, settings["WAGMA_ENGINE"])

    def __call__(self, vector):
        """Average `vector` in place, as this rank's next version.

        Args:
            vector: writable array with the dtype and length of `like`.

        Returns:
            A `Result`: version, timely, source, group, weight, synchronized.

        Raises:
            ValueError, TypeError: if the vector is not such an array; the call has then not
                been made.
            ClosedError: if this collective is closed, or this was a synchronous call and other
                ranks are closing.
            DisagreementError: if this was a synchronous call and other ranks are in another one.

        An exception from a signal handler, such as KeyboardInterrupt, may leave `vector` partly
        averaged; the version goes on without the application.
        """
        return self._collective.call(vector)

    def publish(self, vector):
        """Replace what this rank contributes while it is late, without taking part in a version.

        Under the conserving rule that is what it contributes so far and what `vector` changes of
        what the application last got or published. It waits for an exchange that is under way, at
        most.
        """
        self._collective.publish(vector)

    def synchronize(self, vector):
        """Average `vector` in place over all ranks now; collective, and no version."""
        self._collective.synchronize(vector)

    def average(self, vector):
        """Overwrite `vector` by what `synchronize` would now give, and leave all else as it is.

        Collective: all ranks call it between the same two calls.
        """
        self._collective.average(vector)

    def close(self):
        """Execute every version that any rank has started, on all of them, and leave.

        Collective; ranks may have made different numbers of calls. Closing twice does nothing.
        """
        if self._pid != os.getpid():
            return
        self._collective.close()
        with _interrupts_held():
            if _open.pop(id(self), None):
                _engine.remove(self._collective)
                for communicator in self._communicators:
                    communicator.Free()

    @property
    def closed(self):
        """Whether this collective has been closed."""
        return self._collective.closed

    @property
    def version(self):
        """The version of the next call: how many calls this rank has made."""
        return self._collective.version

    @property
    def executed(self):
        """How many versions have been executed here, whoever started them."""
        return self._collective.executed

    @property
    def nonfinite(self):
        """How many of this rank's vectors were left out because they were not finite."""
        return self._collective.nonfinite

    @property
    def bytes_sent(self):
        """Bytes of vectors that this rank has sent."""
        return self._collective.bytes_sent

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # Closing waits for the other ranks, and the interpreter prints only after that.
        if isinstance(error, Exception) and self.size > 1 and not self.closed:
            print(f"rank {self.rank} is closing because of", file=sys.stderr)
            traceback.print_exception(kind, error, trace)
            sys.stderr.flush()
        self.close()


def _first_error(comm, like, settings):
    """What is wrong with this rank's arguments, or None."""
    from mpi4py import MPI

    group_size, sync_period = settings["group_size"], settings["sync_period"]
    singleton = singleton_error(MPI.COMM_WORLD.size)
    if singleton:
        return singleton
    if not _is_integer(group_size):
        return TypeError(f"group_size is {group_size!r}, not an integer")
    if not 1 <= group_size <= comm.size:
        return ValueError(f"group_size is {group_size}, not between 1 and the {comm.size} ranks")
    if not _is_integer(sync_period):
        return TypeError(f"sync_period is {sync_period!r}, not an integer")
    if sync_period < 1:
        return ValueError(f"sync_period is {sync_period}, less than 1")
    for name, allowed in [
        ("wait", ("nobody", "group")),
        ("late", ("paper", "conserving")),
        ("WAGMA_ENGINE", ENGINE_MODES),
    ]:
        if settings[name] not in allowed:
            return ValueError(f"{name} is {settings[name]!r}, not one of {', '.join(allowed)}")
    if not isinstance(like, np.ndarray):
        return TypeError(f"like is a {type(like).__name__}, not a numpy array")
    if like.dtype not in DTYPES:
        return TypeError(f"like is of dtype {like.dtype}, not float32 or float64")
    if like.ndim != 1:
        return ValueError(f"like has {like.ndim} dimensions, not one")
    if like.size == 0:
        return ValueError("like is empty")
    if not like.flags.c_contiguous:
        return ValueError("like is not contiguous")
    if not like.flags.aligned:
        return ValueError("like is not aligned")
    if not like.flags.writeable:
        return ValueError("like is read-only")
    level = MPI.Query_thread()
    needed = MPI.THREAD_FUNNELED if settings["WAGMA_ENGINE"] == "none" else MPI.THREAD_SERIALIZED
    if level < needed:
        return RuntimeError(
            "MPI was initialised without support for threads (level "
            f"{_level_name(level)}, {_level_name(needed)} is needed): do not lower "
            "mpi4py.rc.thread_level"
        )
    if level == MPI.THREAD_SERIALIZED and _open:
        return RuntimeError(
            "MPI was initialised with thread level SERIALIZED, which allows one open collective "
            "in a process: MULTIPLE is needed for more"
        )
    if len(_open) == MOST_OPEN:
        return RuntimeError(f"{MOST_OPEN} collectives are open in this process already")
    return None


def _level_name(level):
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "SINGLE",
        MPI.THREAD_FUNNELED: "FUNNELED",
        MPI.THREAD_SERIALIZED: "SERIALIZED",
        MPI.THREAD_MULTIPLE: "MULTIPLE",
    }
    return names[level]


def _is_integer(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _difference(comm, settings):
    """What differs between the ranks' settings, the same on every rank, or None."""
    everyone = comm.allgather(settings)
    for name in settings:
        values = {}
        for rank, theirs in enumerate(everyone):
            values.setdefault(theirs[name], []).append(rank)
        if len(values) > 1:
            listed = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())
            return ValueError(f"{name} differs between ranks: {listed}")
    return None


def _crowded(comm):
    """Whether this node's ranks and their progress threads outnumber the cores they may use."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        cores = len(set().union(*node.allgather(os.sched_getaffinity(0))))
        return 2 * node.size > cores
    finally:
        node.Free()


@contextmanager
def _interrupts_held():
    """Hold SIGINT and SIGTERM back: a rank that left half-way would leave the others waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _native():
    """Import the extension only when a collective is made: importing it initialises MPI."""
    from collectives import _engine as native

    return native


def _start(collective, mode):
    global _engine
    if _engine is None:
        _engine = _native().Engine()
        atexit.register(_close_all)
        _close_all_at_finalize()
    _engine.add(collective._collective, mode)
    _open[id(collective)] = collective


def _close_all():
    """Close what the application forgot to, in the order in which all ranks opened it."""
    for collective in list(_open.values()):
        try:
            collective.close()
        except RuntimeError as error:
            print(f"rank {collective.rank}: {error}", file=sys.stderr, flush=True)


def _close_all_at_finalize():
    """MPI deletes COMM_SELF's attributes first when it is finalised, and can still communicate."""
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _close_all())
    MPI.COMM_SELF.Set_attr(key, None)
