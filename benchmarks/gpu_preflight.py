"""What gpu.py looks for before it measures, and the context of the GPU that it keeps open.

Each check that loads a driver, an MPI or torch does so in a process of its own with a time limit,
because one that is installed badly may crash or hang. All checks run at the same time.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from gpu_mps import CONTROL
from gpu_processes import aborting, last_words, run_for

from wagma.mps import VARIABLE, is_running

HERE = Path(__file__).parent
LIMIT = 90.0  # seconds for a check: a device may have to be initialized, and kernels compiled
ENDING = 5.0  # seconds for the process that holds the context to end
# What the suite's tests import, beside what the collectives need.
OF_TESTS = "pytest", "pytest_mpi", "pytest_timeout", "cython", "hypothesis", "ml_dtypes", "psutil"
TESTS = HERE.parent / "tests"
IMPORT_TESTS = f"import conftest; print({', '.join(OF_TESTS)!r})"
HOLD = "import gpu_preflight; gpu_preflight.hold()"
AVERAGE = "import gpu_preflight; gpu_preflight.average()"
TORCH = "import gpu_preflight; print(gpu_preflight.device_of_torch({module!r}))"


class Missing(Exception):
    """The reason why something is not there."""


class Check(NamedTuple):
    """Something that parts need.

    Attributes:
        name: what it is.
        look: function that returns what was found, in words, or raises `Missing`.
        parts: those that are not measured without it.
        without: the effect of its absence, in words, if it is another.
        required: whether nothing can be measured without it.
    """

    name: str
    look: Callable[[], str]
    parts: tuple[str, ...] = ()
    without: str = ""
    required: bool = False

    def concerns(self, jobs) -> bool:
        """Return whether any of the jobs needs it."""
        if self.name == CONTROL:
            return any(job.under_mps for job in jobs)
        return not self.parts or any(job.part in self.parts for job in jobs)


class Finding(NamedTuple):
    """The result of a `Check`: what was found, or why nothing was; the other is empty."""

    check: Check
    found: str
    missing: str

    def __str__(self):
        name = self.check.name
        if not self.missing:
            return f"  found    {name}: {self.found}"
        effect = self.check.without or f"not measured: {', '.join(self.check.parts)}"
        return f"  MISSING  {name}: {self.missing}; {effect}"


def checks(context, arguments, launcher) -> list[Check]:
    """Return all checks.

    Args:
        context: the `Context`.
        arguments: those of gpu.py.
        launcher: the command that starts as many ranks as jobs have at most.
    """
    job = [*launcher, sys.executable, "-c", AVERAGE]
    torch = [sys.executable, "-c", TORCH.format(module=arguments.torch_device)]
    nothing = {"without": "nothing can be measured", "required": True}
    return [
        Check("results", lambda: writable(arguments.results), **nothing),
        Check("collectives on MPI", lambda: said_by(job), **nothing),
        Check("GPU", lambda: context.said("GPU"), **nothing),
        Check(
            *("kernels", lambda: context.said("kernels")),
            without="the host looks for NaN, and no device averages",
        ),
        Check("modules of tests", modules_of_tests, ("tests", "direct-tests")),
        Check("torch", lambda: said_by(torch), ("step",)),
        Check("loopback", loopback, ("step",)),
        Check("C compiler", lambda: executable(os.environ.get("CC", "cc")), ("calls",)),
        Check(CONTROL, mps_control, without="not measured: all parts under MPS"),
    ]


def look(checks, jobs) -> list[Finding]:
    """Make the checks that concern the jobs, all at the same time."""
    made = [each for each in checks if each.concerns(jobs)]
    with ThreadPoolExecutor(len(made)) as threads:
        return list(threads.map(finding, made))


def finding(check) -> Finding:
    try:
        return Finding(check, check.look(), "")
    except Missing as reason:
        return Finding(check, "", str(reason))


def why_not(job, findings) -> str | None:
    """Return why a job cannot be measured, None if nothing that it needs is missing."""
    reasons = [each for each in findings if each.missing and job.part in each.check.parts]
    return "; ".join(f"{each.check.name}: {each.missing}" for each in reasons) or None


# --- The context


class Context:
    """A context of the first GPU, which a process holds open for a block.

    The first process that uses a GPU initializes it. That may take seconds, and unless the driver
    keeps it so (persistence), each job would have to do it again.

    Attributes:
        facts: the device, the driver and its library, once `said("GPU")` has returned.
    """

    def __enter__(self):
        self.facts = {}
        self._said = {name: Future() for name in ("GPU", "kernels")}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            *([sys.executable, "-c", HOLD],), cwd=HERE, stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._process.stdin.close()  # upon which it ends
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self):
        for said in self._said.values():
            line = self._process.stdout.readline()
            if line:
                said.set_result(json.loads(line))
                continue
            status = self._process.wait()
            self._errors.seek(0)
            reason = last_words(self._errors.read()) or f"exit status {status}"
            said.set_exception(Missing(reason))

    def said(self, name: str) -> str:
        """Return what the process has found of "GPU" or "kernels", in words.

        Raises:
            Missing: it has found none, or has not answered in time.
        """
        try:
            found = self._said[name].result(LIMIT)
        except TimeoutError:
            raise Missing(f"no answer after {LIMIT:.0f} s") from None
        if "missing" in found:
            raise Missing(found["missing"])
        self.facts |= found.get("facts", {})
        return found["found"]


def hold():
    """Open a context, say of what, compile the kernels, and wait until standard input is closed."""
    from cuda_driver import CAPABILITY, Device

    def say(**found):
        print(json.dumps(found), flush=True)

    device = Device(0)
    facts = {"device": device.name, "driver": device.version, "library": device.library}
    say(found=f"{device.name}, driver {device.version} ({device.library})", facts=facts)
    try:
        device.kernel("all_finite_float32")
    except Exception as error:
        say(missing=str(error).strip().splitlines()[0])
    else:
        capability = ".".join(str(device.attribute(which)) for which in CAPABILITY)
        say(found=f"compiled for compute capability {capability}")
    sys.stdin.read()


# --- The other checks


def average():
    """As a rank of a job: average with all others in each way; rank 0 prints the MPI's version."""
    import numpy as np
    from mpi4py import MPI

    from collectives import GroupAllreduce

    comm = MPI.COMM_WORLD
    with aborting(comm):
        for transport in ("messages", "shared"):
            x = np.full(1000, comm.rank, np.float32)
            options = {"group_size": comm.size, "wait": "group", "transport": transport}
            with GroupAllreduce(comm, x, **options) as allreduce:
                allreduce(x)
            if not np.all(x == (comm.size - 1) / 2):
                raise RuntimeError(f"a wrong average ({transport}): {x[0]}")
    if comm.rank == 0:
        version = " ".join(MPI.Get_library_version().split("\n")[0].split())
        print(f"{version}, {comm.size} ranks have averaged")


def device_of_torch(module: str | None) -> str:
    """Return torch's version and the device that it has, in words.

    Args:
        module: one whose load() gives torch a device.

    Raises:
        RuntimeError: it has none.
    """
    if module:
        importlib.import_module(module).load()
    import torch

    if module:
        return f"{torch.__version__}, device of {module}"
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} has no CUDA device")
    return f"{torch.__version__}, {torch.cuda.get_device_name(0)}"


def modules_of_tests() -> str:
    """Import what all tests import; return what was looked for."""
    missing = [name for name in OF_TESTS if importlib.util.find_spec(name) is None]
    if not TESTS.exists():
        missing.append("the folder tests")
    if missing:
        raise Missing(", ".join(missing))
    return said_by([sys.executable, "-c", IMPORT_TESTS], cwd=TESTS)


def loopback() -> str:
    """Connect to this machine by TCP, as gloo does; return the address."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LIMIT).close()
    except OSError as error:
        raise Missing(str(error)) from None
    return "127.0.0.1"


def mps_control() -> str:
    if VARIABLE in os.environ or is_running():
        return "MPS is there already"
    return executable(CONTROL)


def executable(name: str) -> str:
    """Return the path of an executable on PATH."""
    path = shutil.which(name)
    if path is None:
        raise Missing("not on PATH")
    return path


def writable(folder: Path) -> str:
    """Make a folder and a file in it; return its path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        raise Missing(str(error)) from None


def said_by(command, cwd=HERE) -> str:
    """Return the last line that a command prints; raise `Missing` with its last words otherwise."""
    try:
        status, text = run_for(command, LIMIT, cwd)
    except OSError as error:
        raise Missing(str(error)) from None
    if status == 0:
        return text.strip().splitlines()[-1]
    how = f"no answer after {LIMIT:.0f} s" if status is None else f"exit status {status}"
    raise Missing(last_words(text) or how)
