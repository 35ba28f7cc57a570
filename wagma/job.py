"""Errors, signals and exit statuses of a job whose ranks behave as one command.

Importing this module does not load MPI. ``run`` loads it before anything else, because a rank that
fails before MPI is initialized cannot end the others, which would wait for it in MPI_Init.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

OK, FAILED, USAGE = 0, 1, 2
REQUEUE = 85  # by default, of a job that can be continued
EXIT_STATUSES = {
    OK: "success",
    FAILED: "an error, which standard error has",
    USAGE: "an error on the command line, or in a file that it names: one line says which",
    REQUEUE: "stopped by a signal or a time limit, to be continued (--resume)",
    128 + signal.SIGINT: "ended by SIGINT (Ctrl-C)",
    128 + signal.SIGUSR1: "ended by SIGUSR1",
    128 + signal.SIGTERM: "ended by SIGTERM",
}
OWN, ASKED, TOLD = "123"  # why a rank ends (see `kind_of`); the lowest is reported first
CLOSING = 90.0  # seconds from the signal that the Slurm scripts request until Slurm kills the job
ENDING = 30.0  # seconds that a rank waits to be ended by another's failure
PATIENCE = {OWN: 1.0, ASKED: 5.0, TOLD: ENDING}  # seconds that a rank waits for others to end
SPEAK_FIRST = 1.0  # seconds for rank 0: launchers end the job when any rank exits with an error
SHORTEST, LONGEST = 1e-3, 1e8  # seconds of a timer
LINE = 1000  # bytes of a rank's message to the others
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
OURS = (f"{ROOT}/wagma/", f"{ROOT}/collectives/")  # in the source tree or installed
# Between the tracebacks of exceptions, as Python writes it.
CAUSED = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


class UsageError(Exception):
    """The command cannot be executed: every rank raises it, and rank 0 prints it in one line."""


class Interrupted(KeyboardInterrupt):
    """A signal asked this rank to stop."""


def launcher_rank() -> int:
    """Return this process's rank without MPI, from its launcher's variables; else 0."""
    torch = ("RANK",) if "LOCAL_RANK" in os.environ else ()
    at_work = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun, which `srun` may have started
    for variable in (*torch, *RANK_VARIABLES) if at_work else (*RANK_VARIABLES, *torch):
        rank = os.environ.get(variable, "")
        if rank.isdigit():
            return int(rank)
    return 0


def announce(what: str) -> None:
    """Print on rank 0 that the job starts, before MPI and torch are loaded, which takes seconds."""
    if launcher_rank() > 0:
        return
    from collectives.agreement import launched_tasks  # not at the top: it loads numpy

    count, _ = launched_tasks()
    where = f" on {count} ranks" if count > 1 else ""
    print(f"wagma {what}: starting{where}, loading MPI and torch", flush=True)


def let_rank_0_speak() -> None:
    """Wait a moment on every rank but 0, so that rank 0 prints its message first."""
    if launcher_rank() > 0:
        time.sleep(SPEAK_FIRST)


def complain(message: str) -> None:
    """Write one line to standard error."""
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        sys.stderr.write(f"wagma: {message}\n")  # in one call, or another rank's may come between
        sys.stderr.flush()


class Signals:
    """SIGINT, SIGTERM and SIGUSR1, deferred except inside ``raising()``.

    They are deferred because a rank that left the job's set-up or shutdown half-way would leave the
    others waiting for it. A second SIGINT kills the process. Batch systems send the other two,
    often twice; they are ignored for `CLOSING` seconds after a first signal, and then kill as well.
    """

    def __init__(self) -> None:
        self.received, self.began = 0, time.monotonic()
        self._raise = False
        # The arguments of `raising_after`, and when its block began.
        self._late: tuple[Callable[[], float], Callable[[], float], float] | None = None
        self._since = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)
        atexit.register(self._ignore_again)

    def _ignore_again(self) -> None:
        """Ignore SIGTERM and SIGUSR1: Python removes its handlers before MPI is finalized."""
        if self.received:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if self.received:
            if number != signal.SIGINT and time.monotonic() - self._since >= CLOSING:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.received, self._since = number, time.monotonic()
        self._set_alarm()
        if self._raise:
            raise Interrupted

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let signals, also a deferred one, raise Interrupted in the block."""
        self._raise = True
        try:
            if self.received:
                raise Interrupted
            yield
        finally:
            self._raise = False

    @contextlib.contextmanager
    def raising_after(
        self, patience: Callable[[], float], deadline: Callable[[], float]
    ) -> Iterator[None]:
        """Let the block go on for so long after a signal, and then raise Interrupted in it.

        What the functions return may change meanwhile.

        Args:
            patience: Returns how long, in seconds.
            deadline: Returns a time that counts as a signal, as `time.time` has it; infinite for
                none.
        """
        self._late = patience, deadline, time.monotonic()
        handler = signal.signal(signal.SIGALRM, self._interrupt)
        self._set_alarm()
        try:
            yield
        finally:
            self._late = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)

    def stopped(self) -> None:
        """Raise nothing any more in `raising_after`: all ranks have stopped."""
        self._late = None
        signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raise nothing in a block that all ranks have come to; `raising_after` begins anew then.

        What the ranks do in it, such as waiting for a disk, takes its time.
        """
        late, self._late = self._late, None
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            if late is not None:
                patience, deadline, _ = late
                self._late = patience, deadline, time.monotonic()
                self._set_alarm()

    def _left(self) -> float:
        """Return the seconds after which Interrupted is raised in `raising_after`."""
        if self._late is None:
            return math.inf
        patience, deadline, began = self._late
        now = time.monotonic()
        asked = min(deadline() - time.time() + now, self._since if self.received else math.inf)
        return max(asked, began) + patience() - now

    def _set_alarm(self) -> None:
        left = self._left()
        if left < LONGEST:
            signal.setitimer(signal.ITIMER_REAL, max(left, SHORTEST))

    def _interrupt(self, number: int, frame: object) -> None:
        if self._left() <= 0:
            raise Interrupted
        self._set_alarm()


def from_rank_0(function: Callable[[], T], comm) -> T:
    """Call a function on rank 0 and return its result on every rank; collective.

    A UsageError that it raises is raised on every rank. The other ranks sleep while they wait.
    """
    result = error = None
    if comm.rank == 0:
        try:
            result = function()
        except UsageError as caught:
            error = caught
    meet(comm)
    result, error = comm.bcast((result, error))
    if error:
        raise error
    return result


def together(function: Callable[[], T], comm) -> T:
    """Call a function on every rank and return this rank's result; collective.

    A UsageError that it raises on any rank is raised on every rank. After any other exception
    every rank raises its own, or else RankFailedError.
    """
    from collectives import RankFailedError  # not at the top: it loads numpy
    from collectives.agreement import raise_collectively

    result = usage = failure = None
    try:
        result = function()
    except UsageError as caught:
        usage = caught
    except (Exception, SystemExit) as caught:
        failure = caught
    meet(comm)
    failed = comm.allgather(failure is not None)
    if any(failed):
        raise failure or RankFailedError(f"rank {failed.index(True)} failed")
    raise_collectively(comm, usage)
    return result


def meet(comm) -> None:
    """Wait for all ranks, asleep: MPI would spin on cores that other ranks may need."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.001)


def check_launch(comm) -> None:
    """Raise UsageError if each process of the job is in an MPI_COMM_WORLD of its own."""
    from collectives.agreement import singleton_error  # not at the top: it loads numpy

    error = singleton_error(comm.size)
    if error:
        raise UsageError(str(error))


def run(command: Callable, settings: object) -> int:
    """Run ``command(settings, comm, signals)`` on this rank and return the exit status.

    A UsageError prints one line and gives status 2 on every rank. Any other exception ends the
    whole job with status 1: see `end`.
    """
    signals = Signals()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return without_mpi()
    comm = MPI.COMM_WORLD
    apart = comm.Dup()  # apart from the operations of ranks that have not failed
    try:
        check_launch(comm)
        return command(settings, comm, signals)
    except BaseException as error:
        return end(apart, error, getattr(settings, "traceback", False))


def without_mpi() -> int:
    """Say, on rank 0, that there is no MPI library, and return the exit status."""
    from collectives.process import load_mpi  # not at the top: it loads numpy

    try:
        load_mpi()
    except ImportError as error:
        if launcher_rank() == 0:
            complain(f"error: {error}")
    let_rank_0_speak()
    return FAILED


def end(comm, error: BaseException, whole: bool = False) -> int:
    """Report why this rank ends, once for all ranks; end the job, or return the exit status.

    If all ranks end, the lowest that has failed itself writes its traceback, and others a line
    each, unless a lower rank writes the same. A rank that ends alone, while others compute or wait,
    does not wait for them long.

    Args:
        comm: A communicator of all ranks that nothing else uses.
        error: The exception that has ended the command on this rank.
        whole: Write all frames of its traceback.

    Returns:
        The status for a UsageError, if all ranks have one or were told of a failure.
    """
    from mpi4py import MPI

    # Not at the top: it loads numpy.
    from collectives.process import describe, end_job, remove_segments, said_at_the_end

    rank, kind = comm.rank, kind_of(error)
    line = describe(error) if kind == OWN else str(error)
    sent = f"{kind}{line}".encode(errors="replace")[:LINE].ljust(LINE)
    received = bytearray(comm.size * LINE)  # must live as long as MPI may write to it
    try:
        met = may_meet() and completed(comm.Iallgather(sent, received), PATIENCE[kind])
    except MPI.Exception:  # the process of a rank has ended
        met = False
    if not met:
        if kind == OWN:
            complain(f"rank {rank} of {comm.size} failed:\n{traceback_of(error, whole)}")
        else:
            complain(f"error: rank {rank}: {line}")
        if kind != ASKED and (said := said_at_the_end()):
            complain(said)
        end_job(MPI.COMM_WORLD, USAGE if kind == ASKED else FAILED)

    lines = [received[start : start + LINE] for start in range(0, len(received), LINE)]
    first = min(range(comm.size), key=lambda each: (lines[each][:1], each))
    if lines[first].startswith(ASKED.encode()):
        if (rank if comm.size > 1 else launcher_rank()) == 0:
            who = "" if len(set(map(bytes, lines))) == 1 else f"rank {first}: "
            text = lines[first].decode(errors="ignore")[1:].rstrip()
            complain(f"error: {who}{text}")
        let_rank_0_speak()
        return USAGE
    if rank == first:
        complain(f"rank {rank} of {comm.size} failed:\n{traceback_of(error, whole)}")
        if said := said_at_the_end():
            complain(said)
    elif kind == TOLD or lines[rank] not in lines[:rank]:
        complain(f"rank {rank} of {comm.size}: {line}")
    remove_segments()  # of each node: only one rank will abort
    completed(comm.Ibarrier(), PATIENCE[OWN])  # all have written
    if rank != first:
        time.sleep(ENDING)
    end_job(MPI.COMM_WORLD, FAILED)


def kind_of(error: BaseException) -> str:
    """Return OWN for this rank's failure, ASKED for a UsageError, TOLD for another rank's."""
    from collectives import RankFailedError

    if isinstance(error, UsageError):
        return ASKED
    cause = error
    while cause is not None:
        if isinstance(cause, RankFailedError):
            return TOLD
        cause = cause.__cause__
    return OWN


def traceback_of(error: BaseException, whole: bool = False) -> str:
    """Return an exception's traceback with its causes, with the frames of the user's own files.

    Args:
        error: The exception.
        whole: Return all frames, as always if none is of the user's files.
    """
    described = traceback.TracebackException.from_exception(error)
    parts = list(chain_of(described))
    if whole or not any(own_frames(each) or is_syntax_error(each) for _, each in parts):
        return "".join(described.format()).rstrip()
    blocks = []
    for link, each in parts:
        last = "".join(each.format_exception_only()).rstrip()
        blocks += [link] if link else []
        blocks.append("\n".join([*folded(each), last]))
    return "\n\n".join(blocks)


def chain_of(described: traceback.TracebackException) -> Iterator[tuple[str, Any]]:
    """Yield an exception's causes and itself, each with the words between it and the one before."""
    before = described.__cause__
    link = CAUSED
    if before is None and not described.__suppress_context__:
        before, link = described.__context__, DURING
    if before is not None:
        yield from chain_of(before)
    yield link if before is not None else "", described


def own_frames(described: traceback.TracebackException) -> list[traceback.FrameSummary]:
    """Return the frames that are of the user's files, not of an installed package or Python's."""
    return [frame for frame in described.stack if owner_of(frame.filename) is None]


def is_syntax_error(described: traceback.TracebackException) -> bool:
    """Return whether it is a SyntaxError, which names the user's file in place of a frame."""
    return owner_of(getattr(described, "filename", None) or __file__) is None


def owner_of(filename: str) -> str | None:
    """Return the package that a file is of, "Python" for its own; None for a file of the user's."""
    path = os.path.abspath(filename)
    if path.startswith(OURS):
        return "wagma"
    for name in ("purelib", "platlib"):
        if path.startswith(start := sysconfig.get_path(name) + os.sep):
            return path.removeprefix(start).split(os.sep)[0].removesuffix(".py")
    standard = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep)
    return "Python" if path.startswith(standard) or filename.startswith("<frozen ") else None


def folded(described: traceback.TracebackException) -> list[str]:
    """Return an exception's frames in lines: the user's first and last ones, and the innermost."""
    frames, own = list(described.stack), own_frames(described)
    shown = [*own[:1], *own[-1:], *frames[-1:]] if own else []
    lines = ["Traceback (most recent call last):"] if frames else []
    groups = itertools.groupby(frames, lambda frame: any(frame is each for each in shown))
    for is_shown, group in groups:
        if is_shown:
            for frame in group:
                lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
                lines += [f"    {frame.line}"] if frame.line else []
        else:
            few = list(group)
            owners = dict.fromkeys(owner_of(frame.filename) or "your files" for frame in few)
            of = f"{len(few)} {'frame' if len(few) == 1 else 'frames'} of {', '.join(owners)}"
            lines.append(f"  [… {of}: --traceback shows them]")
    return lines


def may_meet() -> bool:
    """Return whether this thread may communicate while collectives are open."""
    from mpi4py import MPI

    from collectives.process import open_count

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE or not open_count()


def completed(request, seconds: float) -> bool:
    """Return whether a request completes within `seconds`; sleep meanwhile."""
    deadline = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def run_alone(command: Callable, settings: object) -> int:
    """Run ``command(settings, signals)``, which needs no MPI, and return the exit status.

    A UsageError prints one line and gives status 2; so does a launch of several processes.
    """
    signals = Signals()
    from collectives.agreement import launched_tasks  # not at the top: it loads numpy

    tasks, variable = launched_tasks()
    try:
        if tasks > 1:
            raise UsageError(
                f"this command is one process, not a job of {tasks} ({variable}): start it "
                "without a launcher"
            )
        return command(settings, signals)
    except UsageError as error:
        if launcher_rank() == 0:
            complain(f"error: {error}")
        return USAGE
    except Exception as error:
        complain(f"failed:\n{traceback_of(error, getattr(settings, 'traceback', False))}")
        return FAILED
