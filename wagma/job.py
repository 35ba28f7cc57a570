"""What makes many processes behave as one command: their errors, signals and exit statuses.

Importing this module loads no MPI. ``run`` does, before anything else, because a rank that fails
before MPI is up cannot end the others, which would wait for it there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

OK, FAILED, USAGE = 0, 1, 2
EXIT_STATUSES = {
    OK: "the command has done what it was asked",
    FAILED: "an error: the traceback is on standard error",
    USAGE: "a mistake on the command line, or in what it names: one line says which",
    128 + signal.SIGINT: "ended by SIGINT (Ctrl-C)",
    128 + signal.SIGTERM: "ended by SIGTERM",
}
ENDING = 30.0  # seconds that a rank waits to be ended by another's failure
T = TypeVar("T")
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


class UsageError(Exception):
    """What the user asked for cannot be done: every rank raises it, rank 0 says it in one line."""


class Interrupted(KeyboardInterrupt):
    """A signal asked this rank to stop."""


def launcher_rank() -> int:
    """Return this process's rank without MPI, as its launcher told it; 0 without a launcher."""
    for variable in RANK_VARIABLES:
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return 0


def complain(message: str) -> None:
    """Write one line to standard error."""
    print(f"wagma: {message}", file=sys.stderr, flush=True)


class Signals:
    """SIGINT and SIGTERM, held back except inside ``raising()``.

    Held back, because a rank that left the job's set-up or its end half-way would leave the others
    waiting for it. A second signal of the same kind kills the process.
    """

    def __init__(self) -> None:
        self.received = 0
        self._raise = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if self.received:
            return
        self.received = number
        if self._raise:
            raise Interrupted

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Inside it, a signal raises Interrupted, one that was held back as well."""
        self._raise = True
        try:
            if self.received:
                raise Interrupted
            yield
        finally:
            self._raise = False


def from_rank_0(function: Callable[[], T], comm) -> T:
    """Call a function on rank 0 and return its result on every rank; collective.

    A UsageError that it raises is raised on every rank. The others sleep while they wait.
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

    A UsageError that it raises on any rank is raised on every rank. With any other exception the
    lowest rank that has one ends the job: no other prints the same once more.
    """
    from collectives.agreement import raise_together  # not at the top: it loads numpy

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
        if not failed[comm.rank] or any(failed[: comm.rank]):
            time.sleep(ENDING)
        raise failure or RuntimeError(f"rank {failed.index(True)} has failed")
    raise_together(comm, usage)
    return result


def meet(comm) -> None:
    """Wait for all ranks, asleep: MPI would spin, on cores that the others may need."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.001)


def check_launch(comm) -> None:
    """Raise UsageError where every rank of the job takes itself for the only one."""
    from collectives.agreement import singleton_error  # not at the top: it loads numpy

    error = singleton_error(comm.size)
    if error:
        raise UsageError(str(error))


def run(command: Callable, settings: object) -> int:
    """Run ``command(settings, comm, signals)`` on this rank and return the exit status.

    A UsageError is one line from rank 0, and status 2 everywhere. Any other exception is written
    with its traceback and then ends the whole job with status 1.
    """
    signals = Signals()
    from mpi4py import MPI

    from collectives.process import end_job

    comm = MPI.COMM_WORLD
    try:
        check_launch(comm)
        return command(settings, comm, signals)
    except UsageError as error:
        if (comm.rank if comm.size > 1 else launcher_rank()) == 0:
            complain(f"error: {error}")
        return USAGE
    except BaseException:
        complain(f"rank {comm.rank} of {comm.size} failed:\n{traceback.format_exc().rstrip()}")
        end_job(comm, FAILED)


def run_alone(command: Callable, settings: object) -> int:
    """Run ``command(settings, signals)``, which needs no MPI, and return the exit status.

    A UsageError is one line, and status 2; so is a launcher that has started several processes.
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
