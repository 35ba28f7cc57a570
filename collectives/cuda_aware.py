"""Tests by trial whether this MPI can send vectors from device to device.

Of MPI's own answers only a negative one is trusted: some libraries report support where there is
not even a driver, and some without support accept a device address and send garbage. Others are
CUDA-aware, but their functions wait for copies that the legacy default stream holds up: a rank
whose device is busy would delay the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from collectives.agreement import by_value, list_values
from collectives.errors import CudaError
from collectives.meeting import meet
from collectives.memory import plain_device, probe

__all__ = ["Answer", "ask"]

VARIABLE = "WAGMA_CUDA_AWARE"
CHILD_LIMIT = 20.0  # seconds for a separate process that tries MPI
RANKS_LIMIT = 20.0  # seconds for a message between ranks
# Seconds for which the default stream is kept busy. The next value is tried only if no message
# arrives within the previous one, as can happen if ranks share cores.
HOLDS = (0.05, 0.2, 0.8)
WAITS = "MPI takes device memory, but waits for other work on the device"
COMMAND = (sys.executable, "-m", "collectives.memory.probe")
# Variables by which launchers describe a rank: a process without them is a job of its own. And
# those by which users configure MPI.
LAUNCHERS = re.compile(r"(OMPI|ORTE|PMI2?|PMIX|PRTE|HYDRA|HYDI|SLURM|PALS|ALPS|FLUX)_|MPI_LOCAL")
USERS = re.compile(r"OMPI_(ALLOW_|MCA_(accelerator|btl|mtl|opal|pml))")

log = logging.getLogger("collectives")


class Answer(NamedTuple):
    """Whether MPI may be given device memory, and why; the same on all ranks.

    Attributes:
        aware: it takes device memory, and does not wait for other work of a device.
        reason: a sentence.
    """

    aware: bool
    reason: str


def ask(comm) -> Answer:
    """Find out whether this job's MPI may be given device memory; collective.

    WAGMA_CUDA_AWARE (0, 1) decides if it is set. Otherwise MPI is asked, and unless it says no it
    is tried: first on each node by a separate process, then between the ranks, then while the
    devices' default streams are busy. That takes seconds, and always terminates; it may end the job
    only if MPI works within one process but crashes between ranks.

    Args:
        comm: mpi4py intracommunicator. The ranks of a node use its devices in turn.
    """
    said = forced(comm.allgather(os.environ.get(VARIABLE)))
    if said is not None:
        return said
    trial = _Trial(comm.Dup())
    try:
        for stage in trial.stages():
            found = _gathered(trial.comm, stage)
            if found:
                return Answer(False, _sentence(found, comm.size))
        for size in probe.SIZES:
            for hold in HOLDS:
                found = _gathered(trial.comm, partial(trial.waits, size, hold))
                if set(found) != {WAITS}:
                    break
            if found:
                return Answer(False, _sentence(found, comm.size))
        return Answer(True, "device memory arrives, even while the device has other work")
    finally:
        trial.close()


def forced(values: Sequence[str | None]) -> Answer | None:
    """Return the answer that the variable's values on all ranks give; None if none is 0 or 1."""
    told = {value for value in values if value in ("0", "1")}
    if not told:
        return None
    if len(told) == 2:
        return Answer(False, f"{VARIABLE} is 0 on some ranks, and 1 on others")
    (value,) = told
    return Answer(value == "1", f"{VARIABLE}={value}")


def query() -> str | None:
    """Return the reason if MPI reports that it has no support, else None."""
    from mpi4py import MPI

    if "CRAY MPICH" in MPI.Get_library_version().upper():
        if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
            return "MPICH_GPU_SUPPORT_ENABLED is not 1"
        if "libmpi_gtl_cuda" not in Path("/proc/self/maps").read_text():
            return "the library libmpi_gtl_cuda is not loaded"
    library, answers = ctypes.CDLL(MPI.__file__), []
    with contextlib.suppress(AttributeError):
        answers.append(library.MPIX_Query_cuda_support())
    with contextlib.suppress(AttributeError):
        supported, cuda = ctypes.c_int(1), 0
        library.MPIX_GPU_query_support(cuda, ctypes.byref(supported))
        answers.append(supported.value)
    return None if all(answers) else "this MPI reports that it was built without CUDA"


def try_alone(place: int, limit: float = CHILD_LIMIT) -> str | None:
    """Let another process send device memory to itself; return the error, or None.

    Args:
        place: index of the device on the node.
        limit: seconds that it may take.
    """
    root = str(Path(__file__).parent.parent)
    kept = {
        name: value
        for name, value in os.environ.items()
        if USERS.match(name) or not LAUNCHERS.match(name)
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            [*COMMAND, str(place)],
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # This also ends the processes that it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        lines = output.read().splitlines()
    verdicts = [line for line in lines if line.startswith(probe.VERDICT)]
    verdict = verdicts[-1].removeprefix(probe.VERDICT) if verdicts else None
    if status == 0 and verdict == probe.FINE:
        return None
    log.debug("MPI with device memory, tried in a separate process:\n%s", "\n".join(lines))
    if status is None:
        wrong = f"it has not ended after {limit:g} s"
    elif status < 0:
        wrong = f"it was ended by {signal.Signals(-status).name}"
    elif status or verdict is None:
        wrong = f"it ended with status {status}"
    else:
        wrong = verdict
    return f"sending device memory failed in a separate process: {wrong}"


class _Trial:
    """The stages of `ask`. Each returns the reason for a negative answer, or None."""

    def __init__(self, comm):
        from mpi4py import MPI

        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm, self.node = comm, comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self.device = None

    def stages(self) -> list[Callable[[], str | None]]:
        return [self.no_driver, query, self.alone, self.no_device, self.between_ranks]

    def no_driver(self) -> None:
        plain_device.library()

    def alone(self) -> str | None:
        return try_alone(0) if self.node.rank == 0 else None

    def no_device(self) -> None:
        self.device = probe.Device(self.node.rank)

    def between_ranks(self) -> str | None:
        with self.device.current():
            for comm in (self.node, self.comm):
                for size in probe.SIZES:
                    wrong, _ = probe.exchange(comm, self.device, size, RANKS_LIMIT)
                    if wrong is not None:
                        return f"between ranks: {wrong}"
        return None

    def waits(self, size: int, hold: float) -> str | None:
        """Send a message while the device's default stream is busy for `hold` seconds."""
        with self.device.current():
            wrong, early = probe.exchange(self.comm, self.device, size, RANKS_LIMIT, hold)
        return wrong or (None if early else WAITS)

    def close(self) -> None:
        """Free everything that no pending message can use."""
        from mpi4py import MPI

        busy = self.device is not None and self.device.busy
        if self.device is not None:
            with contextlib.suppress(CudaError):  # the answer's reason already
                self.device.close()
        if not self.comm.allreduce(busy, op=MPI.LOR):
            self.node.Free()
            self.comm.Free()


def _gathered(comm, stage: Callable[[], str | None]) -> dict[str, list[int]]:
    """Return the errors that a stage finds, and their ranks; collective."""
    try:
        wrong = stage()
    except Exception as error:  # whatever MPI, the driver or ctypes raise
        wrong = str(error) or type(error).__name__
    # The other ranks wait asleep for the one whose child process tries MPI.
    meet(comm, "cuda_aware.ask", 0, 0)
    found = by_value(comm.allgather(wrong))
    found.pop(None, None)
    return found


def _sentence(found: dict[str, list[int]], size: int) -> str:
    """Return the errors as a text, with their ranks unless all have the same."""
    (first, ranks), *others = found.items()
    return list_values(found) if others or len(ranks) < size else first
