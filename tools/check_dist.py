"""Build an sdist and from it a wheel; install that in a new environment and run a job with it.

Fails if the sdist lacks a file tracked by git, if the compiler warns of a module, if the wheel
lacks files that users or their compilers need, or if the job does not average. Usage: python
tools/check_dist.py FOLDER; sdist and wheel are written there.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = "collectives/", "wagma/"
LEFT_OUT = {".ci/run", ".editorconfig", ".gitignore", ".pre-commit-config.yaml"}
JOB = """
import sys

import collectives
import numpy as np
from mpi4py import MPI

assert collectives.__file__.startswith(sys.prefix), collectives.__file__
comm = MPI.COMM_WORLD
for transport in "messages", "shared":
    x = np.full(1000, comm.rank, np.float32)
    with collectives.GroupAllreduce(comm, x, transport=transport, sync_period=1) as allreduce:
        allreduce(x)
    assert np.all(x == 0.5), x
print(f"rank {comm.rank}: averaged")
"""


def run(*command, **options):
    print("$", *command, flush=True)
    ended = subprocess.run([str(word) for word in command], text=True, **options)
    if ended.returncode:
        sys.exit(f"{ended.stdout or ''}exit status {ended.returncode}")


def tracked():
    """Return the files tracked by git, except results of benchmarks."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    return {name for name in names if not name.startswith("benchmarks/results/")}


def copy(folder):
    """Copy the tracked files: a build leaves its compiler's flags in the directory."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def check_sdist(path):
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted(tracked() - LEFT_OUT - names):
        sys.exit(f"{path.name} lacks {', '.join(missing)}")


def check_wheel(path):
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    if missing := sorted({name for name in tracked() if name.startswith(PACKAGES)} - names):
        sys.exit(f"{path.name} lacks {', '.join(missing)}")
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    sources = {name.partition(".")[0] for name in names if name.endswith(".pyx")}
    if missing := sorted(sources - compiled):
        sys.exit(f"{path.name} has not compiled {', '.join(missing)}")
    others = {name.partition("/")[0] for name in names if not name.startswith(PACKAGES)}
    if others := sorted(name for name in others if not name.endswith(".dist-info")):
        sys.exit(f"{path.name} would install {', '.join(others)}, too")


def environment(folder):
    """Make a new environment; return the path of its executables."""
    venv.create(folder, with_pip=True, clear=True)
    return folder / "bin"


def main(folder, elsewhere):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MPICC")}
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    caught = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # thousands of lines
    bin = environment(elsewhere / "build")
    run(bin / "python", *quiet, "build")
    shutil.rmtree(folder, ignore_errors=True)
    source = copy(elsewhere / "source")
    warned = f"{sysconfig.get_config_var('CFLAGS')} -Wall -Werror -Wno-error=maybe-uninitialized"
    strict = clean | {"CFLAGS": warned}
    run(bin / "python", "-m", "build", "--outdir", folder, source, env=strict, **caught)
    [sdist], [wheel] = (list(folder.glob(f"*.{end}")) for end in ("tar.gz", "whl"))
    check_sdist(sdist)
    check_wheel(wheel)
    bin = environment(elsewhere / "user")
    run(bin / "python", *quiet, "mpich", wheel, env=clean)
    script = elsewhere / "job.py"
    script.write_text(JOB)
    there = {"cwd": elsewhere, "env": clean, "timeout": 120}
    run(bin / "mpiexec", "-n", 2, bin / "python", script, **there)
    run(bin / "mpiexec", "-n", 2, bin / "wagma", "info", **there)
    print(f"{sdist}: {sdist.stat().st_size >> 10} KiB\n{wheel}: {wheel.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as elsewhere:
        main(Path(sys.argv[1]).resolve(), Path(elsewhere))
