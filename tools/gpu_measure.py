"""Measure the GPU of this machine with what is in this folder; no network is needed.

    python3 measure.py
    python3 measure.py --check
    python3 measure.py --parts staged,passive --limit 300 --results DIR

First an environment is made in this folder (.venv), with the MPI, mpi4py, wagma and what the tests
import. Torch, NVRTC and everything else that this Python has can be imported there. Then
benchmarks/gpu.py measures; options are passed on to it, and --all if none of them says what to
measure. The results are in results/gpu.json unless --results names another folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import site
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEELS = HERE / "wheels"
ENVIRONMENT = HERE / ".venv"
PACKAGES = "collectives", "wagma"
# Never those of the site, which may belong to another MPI.
OURS = "mpi4py", "mpich", "pytest_mpi", "wagma"
WHAT = "--all", "--check", "--parts"
LIMIT = 540.0  # seconds, those of the installation included
# Variables that would have another MPI, or packages of the machine, come before ours.
UNSET = "MPIEXEC", "MPICC", "PYTHONHOME", "PYTHONPATH"


class NotPossible(Exception):
    """The reason why nothing can be measured here."""


def check(made_for: dict) -> None:
    """Raise `NotPossible` unless wheels for this Python and machine are in the folder.

    Args:
        made_for: "python", a version such as "3.12", and "machine".
    """
    here = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    for what, there in made_for.items():
        if here[what] != there:
            raise NotPossible(f"this folder is for {what} {there}, and this is {here[what]}")


def sites() -> list[str]:
    """Return the folders in which this Python looks for packages."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    folders = [*named, *site.getsitepackages(), *own]
    return [os.path.abspath(path) for path in folders if path and os.path.isdir(path)]


def install(folders: list[str], requirements: list[str]) -> Path:
    """Make the environment; return its Python.

    Args:
        folders: see `sites`.
        requirements: what is installed unless those folders have it.
    """
    run([sys.executable, "-m", "venv", "--without-pip", "--clear", ENVIRONMENT])
    python = ENVIRONMENT / "bin" / "python"
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (packages / "outside.pth").write_text("".join(lines))
    [pip] = WHEELS.glob("pip-*.whl")
    pip = [python, pip / "pip", "install", "--quiet", "--no-index", "--no-compile"]
    ours = sorted(path for name in OURS for path in WHEELS.glob(f"{name}-*.whl"))
    run([*pip, "--no-deps", "--ignore-installed", *ours])
    run([*pip, "--find-links", WHEELS, *requirements])
    link(HERE, packages)
    return python


def link(folder: Path, packages: Path) -> None:
    """Let the tests in a folder find the sources of the packages that are installed."""
    for name in PACKAGES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(packages / name)


def run(command) -> str:
    """Run a command; return its output, or raise `NotPossible` with it."""
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    own |= {"PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_INPUT": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    ended = subprocess.run(
        [str(word) for word in command], env=kept | own, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if ended.returncode:
        raise NotPossible(f"{ended.stdout.strip()}\n{' '.join(map(str, command))} failed")
    return ended.stdout.strip()


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (default %(default)g)")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR")
    arguments, options = parser.parse_known_args()
    contents = json.loads((HERE / "bundle.json").read_text())
    try:
        check(contents["made for"])
        folders = sites()
        for name in UNSET:
            os.environ.pop(name, None)
        python = install(folders, contents["requirements"])
    except NotPossible as reason:
        sys.exit(f"measure.py: {reason}")
    taken = time.monotonic() - began
    print(f"wagma {contents['wagma']}, installed in {taken:.0f} s", flush=True)
    if not any(word.partition("=")[0] in WHAT for word in options):
        options.append("--all")
    results = arguments.results.resolve()
    command = [python, HERE / "benchmarks" / "gpu.py", *options, "--results", results]
    command += ["--limit", f"{arguments.limit - taken:.0f}"]
    os.execv(python, [str(word) for word in command])


if __name__ == "__main__":
    main()
