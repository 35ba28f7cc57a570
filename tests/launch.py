"""Start MPI jobs from outside, bound their time, and see that they leave nothing behind."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import forks
import psutil

STARTUP = Path(__file__).parent / "startup"  # see the module in it
WITHOUT_PLOTS = "WITHOUT_PLOTS"  # the variable by which that hides matplotlib
SHARED_MEMORY = Path("/dev/shm")
ENDING = 15.0  # seconds that processes may outlive their mpiexec
# Open MPI starts no ranks as root, and none beyond the number of cores, unless it is told to.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
ULFM = ("--with-ft", "ulfm")
# Code that lets a job's scripts make torch's process group, by the variables that torchrun sets.
LIKE_TORCHRUN = """
import os, socket
from mpi4py import MPI

comm = MPI.COMM_WORLD
with socket.create_server(("127.0.0.1", 0)) as server:
    port = comm.bcast(server.getsockname()[1])
os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
"""
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


class Signal(NamedTuple):
    """A signal for a running job.

    Args:
        number: what to send.
        after: when to send it: seconds from the start, or a text once it is in the output.
        to: "launcher" (mpiexec, as Ctrl-C does), "ranks" (all, as a batch system does), or a rank.
    """

    number: int
    after: float | str
    to: str | int = "launcher"


@dataclass(frozen=True)
class Result:
    """How a job ended; `left` are the shared-memory segments that it left, which are removed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left: tuple[str, ...] = ()

    def check(self) -> Result:
        """Return the result of a job that ended with status 0; fail with its output otherwise."""
        assert self.returncode == 0, f"exit status {self.returncode}\n{self}"
        return self

    @property
    def complaints(self) -> str:
        """What the ranks wrote to standard error, without Open MPI's launcher's own remarks."""
        return re.sub(r"^(-{50,}\n).*?^\1", "", self.stderr, flags=re.MULTILINE | re.DOTALL)

    def __str__(self):
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Job:
    """A command and all processes that come of it, whatever their parents and groups become."""

    def __init__(self, argv, env=None, **popen):
        self._mark = f"WAGMA_JOB_{uuid.uuid4().hex}"
        self._foreign_segments = segments()
        self._segments = set()
        self._seen = set()
        self._look_again = 0.0
        env = {**OPEN_MPI, **(os.environ if env is None else env), self._mark: "1"}
        self.launcher = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True, **popen
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
        self.remove_segments()

    def processes(self) -> list[psutil.Process]:
        """Return the job's living processes."""
        return [p for p in psutil.process_iter() if self._mark in environment(p)]

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes that are ranks (of several jobs inside this one: the last)."""
        found = {}
        for process in self.processes():
            if forks.is_stub(process):
                continue
            rank = next(filter(None, map(environment(process).get, RANK_VARIABLES)), None)
            if rank is not None:
                found[int(rank)] = process
        return found

    def poll(self) -> int | None:
        """Return the exit status, or None while the job runs."""
        self._note_segments()
        return self.launcher.poll()

    def send(self, number, to):
        """Send a signal to "launcher", "ranks" or one rank."""
        if to == "launcher":
            self.launcher.send_signal(number)
        else:
            ranks = self.ranks()
            signal_all(ranks.values() if to == "ranks" else [ranks[to]], number)

    def kill(self):
        """End every process of the job."""
        while processes := self.processes():
            signal_all(processes, signal.SIGKILL)
            time.sleep(0.01)
        self.launcher.wait()

    def left_behind(self) -> list[str]:
        """Return the processes that outlive the launcher by more than a moment."""
        deadline = time.monotonic() + ENDING
        while (processes := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [describe(process) for process in processes]

    def remove_segments(self) -> list[str]:
        """Remove what the job left in shared memory and return the paths."""
        left = sorted(self._segments & segments())
        for path in left:
            Path(path).unlink(missing_ok=True)
        return left

    def _note_segments(self):
        # Another job's segments must not be taken for this one's: ours are those that we map.
        unknown = segments() - self._foreign_segments - self._segments
        new = unknown - self._seen
        began = time.monotonic()
        if not new and (not unknown or began < self._look_again):
            return
        self._seen |= new
        for process in self.processes():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            self._segments |= {path for path in unknown if path in maps}
        # Some ranks may not have mapped a new one yet. Else, looking takes a few percent of the
        # time, beside jobs that compete for cores.
        now = time.monotonic()
        self._look_again = now + (0.2 if new else max(0.05, 30 * (now - began)))


def segments() -> set[str]:
    """Return the paths of all shared-memory segments."""
    return {str(path) for path in SHARED_MEMORY.iterdir()}


def environment(process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error, OSError):
        told = forking().environment(process.pid) if forking.cache_info().currsize else {}
        # Its own first: what is told may be of one that had the same number before.
        return {**told, **process.environ()}
    return {}


def signal_all(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def describe(process) -> str:
    try:
        return f"{process.pid} {process.status()} {shlex.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}"


def mpiexec() -> list[str]:
    """Return the launcher's command: $MPIEXEC, else beside this Python, else on PATH."""
    if named := os.environ.get("MPIEXEC"):
        return shlex.split(named)
    beside = Path(sys.executable).with_name("mpiexec")
    return [str(beside) if beside.exists() else "mpiexec"]


@functools.cache
def is_open_mpi() -> bool:
    """Return whether the launcher is Open MPI's, which kills its ranks when it gets a signal."""
    told = subprocess.run([*mpiexec(), "--version"], capture_output=True, text=True)
    return "Open MPI" in told.stdout


@functools.cache
def has_ulfm() -> bool:
    """Return whether the launcher lets other ranks go on when one's process ends."""
    if not is_open_mpi():
        return False
    told = subprocess.run(
        [*mpiexec(), *ULFM, "-n", "1", "true"],
        env={**OPEN_MPI, **os.environ},
        capture_output=True,
        timeout=30,
    )
    return told.returncode == 0


@functools.cache
def forking() -> forks.Server:
    """Return the server of `mpirun(forked=True)`, which is started when it is first needed."""
    return forks.Server(variables({}))


def variables(others) -> dict[str, str]:
    """Return the variables of processes without plots."""
    # Unbuffered, print writes a line in pieces, between which another rank's may come.
    python = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": ""}
    env = {WITHOUT_PLOTS: "1", **os.environ, **python, **others}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), env.get("PYTHONPATH")]))
    return env


def mpirun(
    ranks,
    *argv,
    timeout,
    env=None,
    cwd=None,
    signals=(),
    options=(),
    plots=False,
    forked=False,
) -> Result:
    """Run `mpiexec -n ranks python argv…` and return its result.

    Fails where the job outlives `timeout`, leaves a process behind, or, having ended with status
    0, a shared-memory segment (an MPICH whose rank is killed always leaves one; it is removed).

    Args:
        ranks: number of ranks; None starts one process without mpiexec.
        argv: Python's: a script, or "-m" and a module, or "-c" and code, and their arguments.
        timeout: seconds.
        env: variables to set beside the current ones, of which PYTHONPATH gets STARTUP as well.
        cwd: the directory to run in.
        signals: each `Signal` is sent once, in this order.
        options: of mpiexec.
        plots: whether there is matplotlib, which takes as long as a short training.
        forked: whether processes are forked from one that has loaded torch, see `forks`.
    """
    launcher = [] if ranks is None else [*mpiexec(), *options, "-n", str(ranks)]
    python = forking().command if forked else [sys.executable]
    command = [*launcher, *python, *map(str, argv)]
    env = variables(env or {})
    if plots:
        assert not forked, "forked processes have no plots"
        del env[WITHOUT_PLOTS]
    pending = list(signals)
    began = time.monotonic()
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        Job(command, env=env, cwd=cwd, stdout=out, stderr=err) as job,
    ):

        def result():
            return Result(job.launcher.poll(), text(out), text(err), time.monotonic() - began)

        while job.poll() is None:
            elapsed = time.monotonic() - began
            if elapsed > timeout:
                print_stacks(job)
                raise AssertionError(f"no end after {timeout} s: {shlex.join(command)}\n{result()}")
            while pending and due(pending[0], elapsed, out, err):
                job.send(pending[0].number, pending[0].to)
                del pending[0]
            time.sleep(0.01)
        ended = result()
        assert not pending, f"ended before {pending} was due\n{ended}"
        processes = job.left_behind()
        assert not processes, f"left behind: {processes}\n{ended}"
        left = job.remove_segments()
        assert not left or ended.returncode, f"left in shared memory: {left}\n{ended}"
        return replace(ended, left=tuple(left))


def due(signal, elapsed, *outputs) -> bool:
    if isinstance(signal.after, str):
        return any(signal.after in text(output) for output in outputs)
    return elapsed >= signal.after


def text(file) -> str:
    # pread: the file's offset is shared with the job that writes.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def print_stacks(job):
    """Let Python's fault handler print where each of the job's processes is; it ends them."""
    processes = job.processes()
    pythons = [p for p in processes if p.name().startswith("python") and not forks.is_stub(p)]
    others = [p for p in processes if p not in pythons]
    for process in pythons:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_CORE, (0, 0))
    # Stopped, because mpiexec ends all ranks as soon as it sees one end.
    signal_all(others, signal.SIGSTOP)
    signal_all(pythons, signal.SIGABRT)
    deadline = time.monotonic() + ENDING
    while any(p in pythons for p in job.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    signal_all(others, signal.SIGCONT)
    deadline = time.monotonic() + ENDING
    while job.poll() is None and time.monotonic() < deadline:  # what was printed is passed on
        time.sleep(0.02)
