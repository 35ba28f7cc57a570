"""What all collectives of a process share: the native engine, and their common end."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback

from collectives.errors import RankFailedError

__all__ = [
    "MOST_OPEN",
    "add",
    "check_not_forked",
    "check_owner",
    "describe",
    "end_job",
    "fail",
    "interrupts_held",
    "library_name",
    "native",
    "open_count",
    "raise_failure_in",
    "release",
    "remove",
    "reserve",
    "tell",
]

MOST_OPEN = 256
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
FORWARDING = 0.3  # seconds that a launcher has to forward what a rank wrote before it aborts

_open: dict[int, object] = {}
# The engine's mode that each collective has asked for, from its construction to its end. A signal
# handler may interrupt the holder of the lock, so it is reentrant.
_places: dict[int, str] = {}
_places_lock = threading.RLock()
_registered = False
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
            f"process {os.getpid()} was forked after MPI was initialized, and cannot use it: "
            "start processes that use collectives before that, or spawn them"
        )


def _note_fork() -> None:
    global _forked
    _forked = "mpi4py.MPI" in sys.modules
    engine = sys.modules.get("collectives.engine.calls")
    if engine is not None:
        engine.note_fork()


os.register_at_fork(after_in_child=_note_fork)


def end_job(comm, status: int) -> None:
    """End all ranks' processes with this exit status, once what this one wrote has been read."""
    sys.stdout.flush()
    time.sleep(FORWARDING)
    comm.Abort(status)
    os._exit(status)  # MPICH's can return before the job is killed


def native():
    """Return the engine's module; only making a collective imports it, as it initializes MPI.

    Raises:
        ImportError: the extensions run on another MPI library than mpi4py does.
    """
    from mpi4py import MPI

    remedy = "build wagma again with the mpicc of mpi4py's MPI (MPICC=/path/to/mpicc)"
    used = library_name(MPI.Get_library_version())
    try:
        from collectives.engine import library
    except ImportError as error:
        raise ImportError(
            f"wagma's extensions were built for another MPI than mpi4py's {used}: {error}; {remedy}"
        ) from error
    built = library_name(library.version())
    if built != used:
        raise ImportError(
            f"wagma's extensions were built for {built}, but mpi4py runs on {used}; {remedy}"
        )
    from collectives.engine import native

    return native


def library_name(version: str) -> str:
    """Return the first line of what an MPI library says about itself."""
    return version.strip().splitlines()[0].strip("\0 ")


def open_count() -> int:
    """Return how many collectives are open in this process."""
    return len(_open)


def check_alone() -> None:
    """Raise RuntimeError if MPI's thread level does not allow a further open collective.

    Not on all ranks alike: the thread that serves those is in MPI, so this one may not even tell.
    """
    from mpi4py import MPI

    with _places_lock:
        if _places and MPI.Query_thread() == MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                "MPI was initialized with thread level SERIALIZED, which allows one open "
                "collective in a process: MULTIPLE is needed for more"
            )


def reserve(collective, mode: str) -> Exception | None:
    """Keep a place for a collective whose construction begins; return why there is none, or None.

    All collectives of a process have the same engine. `release` gives the place back.
    """
    with _places_lock:
        others = set(_places.values())
        if len(_places) == MOST_OPEN:
            return RuntimeError(f"{MOST_OPEN} collectives are open in this process already")
        if others - {mode}:
            return ValueError(
                f"engine is {mode!r}, but the open collectives of this process use {others.pop()!r}"
            )
        _places[id(collective)] = mode
    return None


def release(collective) -> None:
    """Give the place of a collective back, if it has one."""
    with _places_lock:
        _places.pop(id(collective), None)


def add(collective, mode: str) -> None:
    """Let the engine serve a collective, which is closed at the process's end at the latest."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_close_all)
        if sys.excepthook is sys.__excepthook__:  # not a debugger's, or the user's own
            sys.excepthook = _tell_uncaught
        _close_all_at_finalize()
    native().engine.add(collective.native, mode)
    _open[id(collective)] = collective


def remove(collective) -> bool:
    """Serve a closed collective no longer; return whether it was served."""
    if _open.pop(id(collective), None) is None:
        return False
    native().engine.remove(collective.native)
    release(collective)
    return True


def raise_failure_in(comm) -> None:
    """Raise RankFailedError where another rank of this communicator has failed and cannot come.

    That is one that waits in close() of a collective which this rank has still open.
    """
    from mpi4py import MPI

    for collective in list(_open.values()):
        failed, error = collective.native.failure
        if error is None or failed == collective.rank or not collective.native.is_closing(failed):
            continue
        theirs, ours = collective.comm.Get_group(), comm.Get_group()
        (there,) = theirs.Translate_ranks([failed], ours)
        theirs.Free()
        ours.Free()
        if there != MPI.UNDEFINED:
            raise error


def fail(error) -> None:
    """Tell the ranks of all open collectives of this one's error.

    While this rank closes one of them, others may wait for it in another.
    """
    for collective in list(_open.values()):
        collective.fail(error)


def describe(error) -> str:
    """Return an exception's type and text, also where it cannot say its text."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__


def tell(error, rank: int) -> None:
    """Print why a rank leaves its collectives, once for each exception.

    That is its traceback, or one line where the cause is another rank's failure or a signal.
    """
    if _is_told(error):
        return
    with contextlib.suppress(Exception):  # one that takes no attribute is told again
        error._told_by_wagma = True
    if isinstance(error, Exception) and not _is_only_told(error):
        text = f"rank {rank} is closing because of\n{''.join(traceback.format_exception(error))}"
    else:
        text = f"rank {rank} is closing because of {describe(error)}\n"
    sys.stderr.write(text)  # at once, so that other ranks' lines do not come between
    sys.stderr.flush()


def _is_told(error) -> bool:
    return getattr(error, "_told_by_wagma", False)


def _is_only_told(error) -> bool:
    """Whether it is another rank's failure alone, which that rank's traceback tells of."""
    return isinstance(error, RankFailedError) and error.__cause__ is error.__context__ is None


def _tell_uncaught(kind, error, trace) -> None:
    """What Python does with an uncaught exception: nothing where that has been told."""
    if _is_told(error):
        return
    if _is_only_told(error):
        print(describe(error), file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


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
    """MPI deletes COMM_SELF's attributes first when it is finalized, and can still communicate."""
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _close_all())
    MPI.COMM_SELF.Set_attr(key, None)


@contextlib.contextmanager
def interrupts_held():
    """Hold signals that end jobs back: a rank that left half-way would leave the others waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
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
