"""What all collectives of a process share: the native engine, and their common end."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

__all__ = [
    "MOST_OPEN",
    "add",
    "check_not_forked",
    "check_owner",
    "end_job",
    "engine_mode",
    "fail",
    "interrupts_held",
    "library_name",
    "native",
    "open_count",
    "remove",
]

MOST_OPEN = 256
FORWARDING = 0.3  # seconds that a launcher has to forward what a rank wrote before it aborts

_open: dict[int, object] = {}
_mode = None
_forked = False


def check_owner(pid: int) -> None:
    """Raise RuntimeError in any other process than the one that made a collective."""
    if pid != os.getpid():
        raise RuntimeError(
            f"this collective belongs to process {pid}: a forked child cannot use it"
        )


def check_not_forked() -> None:
    """Raise RuntimeError in a child of a process that had started MPI when it forked."""
    if _forked:
        raise RuntimeError(
            f"process {os.getpid()} was forked after MPI had been started, and cannot use it: "
            "start processes that make collectives before that, or by spawning"
        )


def _note_fork() -> None:
    global _forked
    _forked = "mpi4py.MPI" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


def end_job(comm, status: int) -> None:
    """End all ranks' processes with this exit status, once what this one wrote has been read."""
    sys.stdout.flush()
    time.sleep(FORWARDING)
    comm.Abort(status)
    os._exit(status)  # MPICH's can return before the job is killed


def native():
    """Return the engine's module; only making a collective imports it, as it initialises MPI.

    Raises:
        ImportError: the extensions run on another MPI library than mpi4py does.
    """
    from mpi4py import MPI

    remedy = "build wagma again with the mpicc of mpi4py's MPI (MPICC=/path/to/mpicc)"
    used = library_name(MPI.Get_library_version())
    try:
        from collectives import _library
    except ImportError as error:
        raise ImportError(
            f"wagma's extensions were built for another MPI than mpi4py's {used}: {error}; {remedy}"
        ) from error
    built = library_name(_library.version())
    if built != used:
        raise ImportError(
            f"wagma's extensions were built for {built}, but mpi4py runs on {used}; {remedy}"
        )
    from collectives import _engine

    return _engine


def library_name(version: str) -> str:
    """Return the first line of what an MPI library says about itself."""
    return version.strip().splitlines()[0].strip("\0 ")


def open_count() -> int:
    """Return how many collectives are open in this process."""
    return len(_open)


def engine_mode() -> str | None:
    """Return the mode of the engine that serves the open collectives; None where there is none."""
    return _mode if _open else None


def add(collective, mode: str) -> None:
    """Let the engine serve a collective, which is closed at the process's end at the latest."""
    global _mode
    if _mode is None:
        atexit.register(_close_all)
        _close_all_at_finalize()
    _mode = mode
    native().engine.add(collective.native, mode)
    _open[id(collective)] = collective


def remove(collective) -> bool:
    """Serve a closed collective no longer; return whether it was served."""
    if _open.pop(id(collective), None) is None:
        return False
    native().engine.remove(collective.native)
    return True


def fail(error) -> None:
    """Tell the ranks of all open collectives of this one's error.

    While this rank closes one of them, others may wait for it in another.
    """
    for collective in list(_open.values()):
        collective.fail(error)


def _close_all() -> None:
    """Close what the application forgot to, in the order in which all ranks opened it."""
    if _forked:
        return
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None:
        fail(uncaught)
    for collective in list(_open.values()):
        collective.native.begin_close()
    for collective in list(_open.values()):
        try:
            collective.close()
        except Exception as error:  # the next one must be closed as well
            print(f"rank {collective.rank}: {error}", file=sys.stderr, flush=True)


def _close_all_at_finalize() -> None:
    """MPI deletes COMM_SELF's attributes first when it is finalised, and can still communicate."""
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _close_all())
    MPI.COMM_SELF.Set_attr(key, None)


@contextmanager
def interrupts_held():
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
