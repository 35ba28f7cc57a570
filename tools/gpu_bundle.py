"""Gather what a machine needs to measure its GPU in one folder, to be copied there and run.

    python tools/gpu_bundle.py FOLDER --python python3.12
    python tools/gpu_bundle.py FOLDER --python python3.12 --rehearse

The folder has wheels of wagma, of an MPI (PyPI's mpich) and of what the benchmark's tests import,
for the version of PYTHON and for machines like this one, as well as the benchmarks, the tests and
measure.py, which installs and measures: see there. The machine needs that version of Python and
CUDA's driver, and no network; torch, NVRTC and a C compiler if it is to measure everything.

--rehearse runs measure.py in a copy of the folder, on the stand-in for the driver and, if the
system permits, without a network. NVRTC is that of this environment, as well as the test device of
torch if PYTHON has torch.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_measure
from check_dist import ROOT, copy, tracked
from extra import project, requirements

MOST = 64 << 20  # bytes of the folder
FOLDERS = "benchmarks/", "tests/"
FILES = ("pyproject.toml",)
BUILD = "setuptools", "Cython", "mpich", "mpi4py"
# Those without the packages that they require.
OURS = "mpich", "mpi4py", "pytest-mpi"
VERSION = "import sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
# Of the requirements of the tests those that the benchmark's tests import.
OF_TESTS = "cython", "hypothesis", "ml_dtypes", "psutil", "pytest", "pytest-timeout"
SMALL = (
    *("--kib=64", "--parameters=6000", "--busy-mib=1", "--rounds=1", "--seconds=0.2"),
    "--tests=not kept",
)
# Without a network but the loopback, by which ranks meet.
LOOPBACK = 'ip link set lo up && exec "$@"'
OFFLINE = "unshare", "--map-root-user", "--net", "sh", "-c", LOOPBACK, "sh"


def run(*command, **options):
    print("$", *command, flush=True)
    ended = subprocess.run([str(word) for word in command], **options)
    if ended.returncode:
        sys.exit(f"exit status {ended.returncode}")


def said(command):
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def name_of(requirement):
    return re.match(r"[\w-]+", requirement).group()


def needed():
    """Return the requirements of wagma, and of the benchmark's tests."""
    of_tests = [each for each in requirements("test") if name_of(each) in OF_TESTS]
    return [each for each in project["dependencies"] if name_of(each) != "mpi4py"] + of_tests


def fill(folder, python, wheel, elsewhere):
    """Make all files of the folder.

    Args:
        python: the interpreter for whose version wheels are collected.
        wheel: wagma's for that version, built with PyPI's mpich; None: it is built.
        elsewhere: a temporary folder.
    """
    wheels = folder / "wheels"
    names = [name for name in tracked() if name.startswith(FOLDERS) or name in FILES]
    for name in sorted(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    shutil.copy2(gpu_measure.__file__, folder / "measure.py")
    run(python, "-m", "venv", elsewhere / "build")
    built = elsewhere / "build" / "bin" / "python"
    pip = [built, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", *BUILD)
    if wheel:
        shutil.copy2(wheel, wheels)
    else:
        env = {**os.environ, "MPICC": str(built.parent / "mpicc")}
        env.pop("PYTHONPATH", None)
        options = ["--no-build-isolation", "--no-deps", "-w", wheels]
        run(*pip, "wheel", *options, copy(elsewhere / "source"), env=env)
    download = [*pip, "download", "--only-binary=:all:", "-d", wheels]
    run(*download, "pip", *needed())
    run(*download, "--no-deps", *OURS)
    run(*pip, "install", "--no-index", "--find-links", wheels, "wagma", *needed())
    build_passes(folder, built)
    contents = {
        "wagma": said(["git", "describe", "--always", "--dirty"]),
        "made for": {"python": said([built, "-c", VERSION]), "machine": platform.machine()},
        "requirements": needed(),
    }
    (folder / "bundle.json").write_text(json.dumps(contents, indent=1) + "\n")


def build_passes(folder, python):
    """Build the extension that tests compile, for machines without a compiler or Cython."""
    gpu_measure.link(folder, Path(said([python, "-c", PACKAGES])))
    env = {**os.environ, "PYTHONPATH": str(folder / "tests"), "PYTHONDONTWRITEBYTECODE": "1"}
    run(python, "-c", "import device_passes; device_passes.module()", cwd=folder, env=env)
    for name in gpu_measure.PACKAGES:
        (folder / name).unlink()


def check_size(folder):
    """Exit with the largest files if the folder is too large to be copied."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total >= MOST:
        largest = sorted(sizes, key=sizes.get, reverse=True)[:5]
        named = ", ".join(f"{path.relative_to(folder)}: {sizes[path] >> 20}" for path in largest)
        sys.exit(f"{folder} has {total >> 20} MiB, more than {MOST >> 20} ({named})")
    print(f"{folder}: {len(sizes)} files, {total >> 20} MiB", flush=True)


def rehearse(folder, python, elsewhere):
    """Run measure.py on the stand-in, in a copy of the folder; exit unless all parts succeed."""
    sys.path.insert(0, str(ROOT / "tests"))
    import stand_in

    from collectives.memory import nvrtc

    env = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "WAGMA_CUDA_LIBRARY": stand_in.plain_library(),
        "WAGMA_NVRTC_LIBRARY": nvrtc.library()._name,
        "WAGMA_CACHE_DIR": str(elsewhere / "cache"),
        **{"STAND_IN_DELAY": "1", "STAND_IN_IPC": "1", "STAND_IN_QUEUE": "1024"},
    }
    options = list(SMALL)
    if subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0:
        import torch_device

        torch_device.build()
        env["PYTHONPATH"] = str(ROOT / "tests")
        options.append("--torch-device=torch_device")
    permitted = subprocess.run([*OFFLINE, "true"], stderr=subprocess.DEVNULL).returncode == 0
    if not permitted:
        print("unshare is not permitted here: the network stays reachable", flush=True)
    there = elsewhere / "copy"
    shutil.copytree(folder, there)
    offline = OFFLINE if permitted else ()
    run(*offline, python, there / "measure.py", *options, env=env, cwd=elsewhere)


def main():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("folder", type=Path, help="which is made, and replaced if it is there")
    made.add_argument("--python", default=sys.executable, help="(default: this one)")
    made.add_argument(
        "--wheel", type=Path, help="wagma's, such as `make dist` makes (default: build)"
    )
    made.add_argument("--rehearse", action="store_true", help="run measure.py on the stand-in")
    arguments = made.parse_args()
    folder, python = arguments.folder.resolve(), shutil.which(arguments.python)
    if python is None:
        made.error(f"no {arguments.python} on PATH")
    if folder.exists() and not (folder / "bundle.json").exists() and any(folder.iterdir()):
        made.error(f"{folder} is there already, and is no bundle")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    (folder / "bundle.json").touch()  # so that one that was not finished is replaced
    with tempfile.TemporaryDirectory() as elsewhere:
        fill(folder, python, arguments.wheel, Path(elsewhere))
        check_size(folder)
        if arguments.rehearse:
            rehearse(folder, python, Path(elsewhere))


if __name__ == "__main__":
    main()
