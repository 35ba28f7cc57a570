"""State that all collectives of a process share: the native engine, and closing at exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from collectives import survival
from collectives.errors import RankFailedError
from collectives.witness import Identity, Witness

__all__ = [
    "MOST_OPEN",
    "add",
    "check_not_forked",
    "check_owner",
    "clock",
    "describe",
    "end_job",
    "fail",
    "interrupts_held",
    "library_name",
    "load_mpi",
    "native",
    "node",
    "open_count",
    "opened",
    "place_of",
    "print_cause",
    "raise_failure_in",
    "release",
    "remove",
    "remove_segments",
    "reserve",
    "start_engine",
    "thread_error",
    "world_size",
]

MOST_OPEN = 256
MPICH_SEGMENT = "/dev/shm/mpich_shm_"
ABORTING = 3.0  # seconds for MPI_Abort to end the job
FORWARDING = 0.3  # seconds for the launcher to forward a rank's output before the rank aborts

_open: dict[int, object] = {}
# The engine mode that each collective was constructed with, until it is closed. A signal handler
# may interrupt the holder of the lock, so the lock is reentrant.
_places: dict[int, str] = {}
_places_lock = threading.RLock()
_registered = False
_mpi_tells = False  # whether MPI itself tells of the end of another rank's process
# Functions that return what is to be said where the job ends without a rank, such as the newest
# checkpoint's name; "": nothing.
last_words: list = []
_forked = False


def check_owner(pid: int) -> None:
    """Raise RuntimeError in any process other than the one that constructed a collective."""
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
    engine = sys.modules.get("collectives.engine.driver")
    if engine is not None:
        engine.note_fork()


os.register_at_fork(after_in_child=_note_fork)


def end_job(comm, status: int) -> None:
    """End all ranks' processes with this exit status, after this rank's output was forwarded."""
    with contextlib.suppress(Exception):  # such as a closed pipe, of stdout
        sys.stdout.flush()
    remove_segments()
    time.sleep(FORWARDING)
    if survival.is_offered():  # where Open MPI's may wait for ranks that have died
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=_exit_soon, args=[status], daemon=True).start()
    try:
        comm.Abort(status)
    finally:
        os._exit(status)  # MPICH's can return before the job is killed


def _exit_soon(status: int) -> None:
    time.sleep(ABORTING)
    os._exit(status)


def remove_segments() -> None:
    """Unlink MPICH's shared memory of this job on this node, which MPI_Abort would leave behind.

    MPICH unlinks it only in MPI_Finalize. Unlinking is safe: all ranks of the node have mapped it
    in MPI_Init, and no other job uses the segments that this process has mapped.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and path[0].startswith(MPICH_SEGMENT) and not path[0].endswith(" (deleted)"):
                Path(path[0]).unlink(missing_ok=True)


def load_mpi():
    """Return `mpi4py.MPI`, whose import initializes MPI.

    Raises:
        ImportError: there is no MPI library; the message is one line, with the remedy.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise  # mpi4py itself
    except (ImportError, RuntimeError) as error:
        reason = "; ".join(str(error).splitlines()[:2])
        raise ImportError(
            f"no MPI library was found ({reason}): pip install mpich, or load your site's MPI "
            "(such as module load mpich), or name its library (MPI4PY_LIBMPI=/path/to/libmpi.so)"
        ) from None
    return MPI


def native():
    """Return the engine's module, whose import initializes MPI.

    Raises:
        ImportError: the extensions run on another MPI library than mpi4py does, or there is none.
    """
    MPI = load_mpi()
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
    from collectives.engine import deaths, native

    global _mpi_tells
    _mpi_tells = survival.is_offered() and deaths.find_revoke()
    if _mpi_tells:
        deaths.let_finalize_end()
    return native


def library_name(version: str) -> str:
    """Return the first line of an MPI library's version text."""
    return version.strip().splitlines()[0].strip("\0 ")


def place_of(comm):
    """Return where a communicator's ranks live: this module, or the object that it names.

    The ranks of a simulated job live in one process, and its communicators have a `place`, which
    offers what this module does for a rank that is a process.
    """
    return getattr(comm, "place", sys.modules[__name__])


def clock() -> float:
    """Return the time, in seconds since some moment."""
    return time.perf_counter()


def world_size() -> int:
    """Return the number of ranks of the job, as MPI counts them."""
    return load_mpi().COMM_WORLD.size


def node(comm):
    """Return the `Node` of this rank; collective."""
    from collectives.node import Node  # not at the top: it imports this module's importers

    return Node(comm)


def unmap_windows() -> None:
    """Unmap the windows of which no process has an array any more."""
    from collectives.memory import windows

    windows.unmap_released()


def open_count() -> int:
    """Return how many collectives are open in this process."""
    return len(_open)


def opened() -> list:
    """Return the open collectives of this process, in the order of their construction."""
    return list(_open.values())


def check_alone() -> None:
    """Raise RuntimeError if MPI's thread level does not allow another open collective.

    Only this rank raises it: its progress thread may be in MPI, so it cannot tell the others.
    """
    from mpi4py import MPI

    with _places_lock:
        if _places and MPI.Query_thread() == MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                "MPI was initialized with thread level SERIALIZED, which allows one open "
                "collective in a process: MULTIPLE is needed for more"
            )


def thread_error(mode: str) -> Exception | None:
    """Return why no collective of this engine mode can be constructed in this process, or None."""
    from mpi4py import MPI

    from collectives.settings import level_name  # not at the top: it loads numpy

    level = MPI.Query_thread()
    needed = MPI.THREAD_FUNNELED if mode == "none" else MPI.THREAD_SERIALIZED
    if level < needed:
        return RuntimeError(
            "MPI was initialized without support for threads (level "
            f"{level_name(level)}, {level_name(needed)} is needed): do not lower "
            "mpi4py.rc.thread_level"
        )
    return None


def reserve(collective, mode: str) -> Exception | None:
    """Reserve a place for a collective to be constructed; return why there is none, or None.

    All collectives of a process have the same engine mode. `release` gives the place back.
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


def start_engine(mode: str) -> Exception | None:
    """Start the progress thread for a collective with a place; return why it does not start."""
    if mode == "none":
        return None
    with _places_lock:
        try:
            native().engine.start(mode)
        except RuntimeError as error:
            return RuntimeError(
                f"the progress thread does not start ({error}): raise the limit of processes "
                "(ulimit -u, or the container's), or use engine='none'"
            )
    return None


def begin_timeline() -> Exception | None:
    """Begin to record this process's timeline if its environment asks for one; return the error."""
    from collectives import timeline  # not at the top: it imports this module

    return timeline.begin_if_asked()


def add_to_timeline(collective, comm) -> None:
    """Add a collective that is being made to the timeline, if one is recorded; collective."""
    from collectives import timeline

    timeline.opened(collective, comm)


def release(collective) -> None:
    """Release the place of a collective, if it has one; with the last one the engine ends."""
    with _places_lock:
        _places.pop(id(collective), None)
        progress = sys.modules.get("collectives.engine.progress")
        if not _places and progress is not None:
            progress.engine.end()


def add(collective, mode: str) -> None:
    """Let the engine serve a collective; it is closed when the process ends, if not before."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_close_all)
        if sys.excepthook is sys.__excepthook__:  # not a debugger's, or the user's own
            sys.excepthook = _print_uncaught
        _close_all_at_finalize()
    native().engine.add(collective.native, mode)
    _open[id(collective)] = collective
    if not _mpi_tells:
        _witness.watch(list(collective._processes.values()))


def said_at_the_end() -> str:
    """Return `last_words` in one line; "": there are none."""
    with contextlib.suppress(Exception):  # nothing may keep the job from ending
        return "; ".join(text for each in last_words if (text := each()))
    return ""


def _end_without(ended: Identity) -> None:
    """End the job if a collective of this rank still needs the process that has ended."""
    for collective in opened():
        if not collective.native.needs_others():
            continue
        for rank, process in collective._processes.items():
            if process == ended:
                said = said_at_the_end()
                _write(
                    f"rank {collective.rank}: the process of rank {rank} has ended (process "
                    f"{ended.process} of this node): ending the job{said and '; ' + said}\n"
                )
                end_job(collective.comm, 1)


_witness = Witness(_end_without)


def remove(collective) -> bool:
    """Stop serving a closed collective; return whether it was served."""
    if _open.pop(id(collective), None) is None:
        return False
    native().engine.remove(collective.native)
    release(collective)
    return True


def raise_failure_in(comm) -> None:
    """Raise RankFailedError if another rank of this communicator has failed and will not arrive.

    Such a rank waits in close() of a collective that this rank still has open.
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
    """Tell the ranks of all open collectives of this rank's error.

    While this rank closes one of these collectives, other ranks may wait for it in another.
    """
    for collective in list(_open.values()):
        collective.fail(error)


def describe(error) -> str:
    """Return an exception's type and text; only the type if the text cannot be computed."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__


def print_cause(error, rank: int) -> None:
    """Print why a rank closes its collectives, once for each exception.

    It prints the traceback; one line if the cause is another rank's failure or a signal.
    """
    if _is_printed(error):
        return
    with contextlib.suppress(Exception):  # one that accepts no attribute is printed again
        error._printed_by_wagma = True
    if isinstance(error, Exception) and not _is_of_another_rank(error):
        text = f"rank {rank} is closing because of\n{''.join(traceback.format_exception(error))}"
    else:
        text = f"rank {rank} is closing because of {describe(error)}\n"
    _write(text)


def _write(text: str) -> None:
    """Write to stderr in one piece, so that no other rank's lines come between, if it is open."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_printed(error) -> bool:
    return getattr(error, "_printed_by_wagma", False)


def _is_of_another_rank(error) -> bool:
    """Return whether an error only reports another rank's failure: that rank prints a traceback."""
    return isinstance(error, RankFailedError) and error.__cause__ is error.__context__ is None


def _print_uncaught(kind, error, trace) -> None:
    """Print an uncaught exception, as `sys.excepthook`, unless it has been printed."""
    if _is_printed(error):
        return
    if _is_of_another_rank(error):
        print(describe(error), file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def _close_all() -> None:
    """Close the collectives left open, in the order in which all ranks constructed them."""
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
    """Close all in MPI_Finalize, which deletes COMM_SELF's attributes first, while MPI works."""
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _close_all())
    MPI.COMM_SELF.Set_attr(key, None)


@contextlib.contextmanager
def interrupts_held():
    """Delay signals: a handler may raise, and others would wait for a rank that left half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)
