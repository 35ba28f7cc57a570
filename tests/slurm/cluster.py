"""A Slurm of two virtual nodes on this machine: munged, slurmctld and two slurmd.

``python -m tests.slurm.cluster COMMAND`` runs a command with it. Needs root, and Debian's packages
slurm-wlm and munge; nothing of the system's own Slurm is used or changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol")
NODES = ("n1", "n2")
BEGINNING = 30.0  # seconds that the nodes have to become idle

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
KillWait=5
SlurmdTimeout=10
MinJobAge=600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Return what this machine lacks to run Slurm; empty: nothing."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "slurmd needs root"


class Cluster:
    """A running Slurm.

    Args:
        folder: where its files are; short, as munged's socket is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [each for each in self.environment if each.startswith(("SLURM_JOB", "PMI"))]:
            del self.environment[name]

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        host = socket.gethostname()
        text = CONFIGURATION.format(host=host, folder=self.folder, ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        places = {
            "socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid",
            "log-file": "munged.log", "seed-file": "munged.seed",
        }  # fmt: skip
        munge = [f"--{name}={self.folder / place}" for name, place in places.items()]
        self._start("munged", "munged", "--foreground", "--force", *munge)
        self.wait_until(lambda: (self.folder / "munge.socket").exists(), "munged listens")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_until(
            lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.split()[:2] == ["idle", "2"],
            "both nodes are idle",
        )

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd and all processes of jobs there, as if the node had lost power."""
        slurmd = self.daemons.pop(node)
        slurmd.kill()
        slurmd.wait()
        for process in self.processes_on(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes_on(self, node: str) -> list[int]:
        """Return the jobs' processes on a node, and those of Slurm that started them."""
        ours = {f"SLURM_CONF={self.folder / 'slurm.conf'}", f"SLURMD_NODENAME={node}"}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if ours <= set((entry / "environ").read_text(errors="replace").split("\0")):
                    found.append(int(entry.name))
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                        found.append(parent)
        return [*dict.fromkeys(found)]

    def run(self, *command: str, **options) -> subprocess.CompletedProcess:
        """Run one of Slurm's commands, and return its output."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, **options
        )

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """Submit a job from a directory, and return its number."""
        ended = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env={**self.environment, **variables},
            cwd=cwd, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """Return a field of ``scontrol show job``; empty: there is none."""
        for word in self.run("scontrol", "show", "job", job).stdout.split():
            key, _, value = word.partition("=")
            if key == name:
                return value
        return ""

    def wait_for(self, job: str, *states: str, seconds: float) -> str:
        """Wait until a job is in one of these states, and return it."""
        self.wait_until(
            lambda: self.field(job, "JobState") in states, f"job {job} is {states}", seconds
        )
        return self.field(job, "JobState")

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        if "slurmctld" in self.daemons:
            self.run("scancel", "--user=root", "--signal=KILL")
            self.run("scancel", "--user=root")
            with contextlib.suppress(AssertionError):
                self.wait_until(lambda: not self.run("squeue", "-h").stdout, "no job is left")
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output
            )

    def processes(self) -> list[int]:
        """Return the jobs' processes on both nodes."""
        return [process for node in NODES for process in self.processes_on(node)]

    def wait_until(
        self, holds: Callable[[], object], what: str, seconds: float = BEGINNING
    ) -> None:
        """Wait until a condition holds; AssertionError: it does not within so many seconds."""
        end = time.monotonic() + seconds
        while not holds():
            for name, daemon in self.daemons.items():
                assert daemon.poll() is None, f"{name} ended:\n{self.said(name)}"
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.said()}"
            time.sleep(0.1)

    def said(self, name: str = "") -> str:
        """Return the ends of the daemons' logs and outputs."""
        files = sorted(f for kind in ("log", "out") for f in self.folder.glob(f"*{name}*.{kind}"))
        return "\n".join(f"{each.name}:\n{each.read_text()[-2000:]}" for each in files)


def free_ports(count: int) -> list[int]:
    """Return so many ports that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Run a cluster in the block; its files are removed unless an exception leaves it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if missing():
        sys.exit(missing())
    with running() as cluster:
        sys.exit(subprocess.run(sys.argv[1:], env=cluster.environment).returncode)
