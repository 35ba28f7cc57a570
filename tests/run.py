"""Run the whole suite: tests of one process and launched jobs, MPI tests at each number of ranks.

Ranks wait for each other half of the time, so two parts of the suite run side by side. The first
one's output is shown as it comes, that of the others afterwards. Tests of torch's test device are
in processes of their own, where it then stays. --brief leaves only what another MPI is most likely
to break: the tests of four ranks, and where ranks can go on without others a few launched jobs of
that, those marked `brief`. --extra runs what takes too long for the rest: long explorations,
bugs planted into what devices do, allocations that can fail, and the lines of the documentation,
but not what takes many minutes (`pytest -m long`). --cuda-mpi leaves only the MPI tests of devices,
for a CUDA-aware Open MPI 4 that gets the stand-in for its driver. Other arguments go to every
pytest; where they are files, only what has tests of these is started. Each part must pass, and must
run something unless the arguments select tests; the exit status is 0 only then.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from launch import STARTUP, Job, has_ulfm, mpiexec, print_stacks
from lockstep import DEFAULT_SIZES, SIZES, may_run_with

NO_TESTS = 5  # pytest's exit status
BRIEF, CUDA_MPI = (4,), (4, 1)  # numbers of ranks
DEVICES = "test_cuda_*.py", "test_device*_mpi.py"
TIME_LIMIT = 1800  # seconds, of a part; only a hang takes so long
# There are more ranks than cores: those that wait in a blocking call of MPICH's, as only tests and
# constructors do, let the others run. (Open MPI sees to that by itself.)
YIELDING = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


class Part(NamedTuple):
    """A run of pytest: of the tests with these marks, on so many ranks or in one process (0)."""

    name: str
    command: list
    marks: str
    ranks: int = 0

    def may_run(self, text):
        """Return whether it has tests of a module with this text."""
        for mark in self.marks.split(" and "):
            name = mark.removeprefix("not ")
            used = re.search(rf"mark\.{name}\b", text)
            on_all = re.search(rf"^pytestmark = .*\bmark\.{name}\b", text, re.MULTILINE)
            if on_all if name != mark else not used:
                return False
        return not self.ranks or may_run_with(self.ranks, text)


class Outcome(NamedTuple):
    """How a part ended: its exit status, None where it took too long, and what it took."""

    name: str
    status: int | None
    seconds: float
    output: str  # where it was not shown


def parts(brief, cuda_mpi, extra):
    """Return what there is to run, those that take longest first."""
    pytest = [sys.executable, "-m", "pytest"]
    # The ranks' caches would overwrite each other.
    mpi = [*pytest, "--with-mpi", "-p", "no:cacheprovider", "--timeout-method=thread"]
    # On all cores. While jobs wait for what they test, tests of one process go on.
    cores = [*pytest, "-n", "auto", "--dist", "worksteal"]
    here, there = "not torch_device and not extra", "torch_device"
    found, devices = [], []
    if extra:
        here = "extra and not long"
        found.append(Part("one process", cores, f"not mpi and {here}"))
    elif not (brief or cuda_mpi):
        found.append(Part("one process", cores, f"not mpi and {here}"))
        devices.append(Part("its test device", pytest, f"{there} and not mpi"))
    if cuda_mpi:
        mpi += sorted(str(path) for pattern in DEVICES for path in Path("tests").glob(pattern))
    for size in CUDA_MPI if cuda_mpi else BRIEF if brief or extra else SIZES:
        # Torch's compiler is at work in one process, and would take each rank two seconds to load.
        path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
        job = ["env", f"PYTHONPATH={path}", *mpiexec(), "-n", str(size), *mpi]
        found.append(Part(f"{size} rank{'s' * (size > 1)}", job, f"mpi and {here}", size))
        if size == DEFAULT_SIZES[0] and not (cuda_mpi or extra):
            devices.append(Part("their test device", job, f"mpi and {there}", size))
    if brief and has_ulfm():
        devices.append(Part("deaths", pytest, "launch and brief"))
    return found + devices


def with_tests_of(arguments, parts):
    """Return the parts that have tests of the files among the arguments, if any are."""
    files = [Path(each.partition("::")[0]) for each in arguments]
    texts = [file.read_text() for file in files if file.suffix == ".py" and file.exists()]
    return [part for part in parts if not texts or any(map(part.may_run, texts))]


def run(part, arguments, ended, shown):
    """Run a part until it ends, takes too long, or all are to end; return its outcome."""
    # Of a process with several threads, those that wait for one sleep.
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **YIELDING, **os.environ}
    # Else every process would compile the tests anew, and pytest all of hypothesis: a second each.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        output = {} if shown else {"stdout": file, "stderr": subprocess.STDOUT}
        status = None
        with Job([*part.command, "-m", part.marks, *arguments], env=env, **output) as job:
            while (status := job.poll()) is None and not ended.is_set():
                if time.monotonic() > began + TIME_LIMIT:
                    print_stacks(job)
                    break
                time.sleep(0.1)
        file.seek(0)
        return Outcome(part.name, status, time.monotonic() - began, file.read())


def outcomes(parts, arguments):
    """Run the parts, two at a time; generate their outcomes in the parts' order."""
    ended = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run, part, arguments, ended, shown=part is parts[0]) for part in parts
        ]
        try:
            print(f"\n=== tests: {parts[0].name}", flush=True)
            for number, part in enumerate(running):
                outcome = part.result()
                if number:
                    print(f"\n=== tests: {outcome.name}\n{outcome.output}", flush=True)
                yield outcome
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)


def stand_in_for_mpi():
    """Return what makes the stand-in MPI's driver, and lets ranks outnumber cores."""
    import stand_in

    folders = [str(Path(stand_in.library()).parent), os.environ.get("LD_LIBRARY_PATH")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
        "OMPI_MCA_btl_smcuda_use_cuda_ipc": "0",  # the stand-in has none
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


def verdict(status, selected):
    """Return whether a part is good, and in words."""
    if status is None:
        return False, f"no end after {TIME_LIMIT} s"
    if status == NO_TESTS:
        return selected, "no tests"
    return status == 0, "passed" if status == 0 else f"failed (exit status {status})"


def main(arguments):
    # A terminated run still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.chdir(Path(__file__).parent.parent)
    options = "--brief", "--cuda-mpi", "--extra"
    brief, cuda_mpi, extra = (option in arguments for option in options)
    arguments = [each for each in arguments if each not in options]
    if cuda_mpi:
        os.environ |= stand_in_for_mpi()
    chosen = with_tests_of(arguments, parts(brief, cuda_mpi, extra))
    if not chosen:
        print("no tests")
        return 1
    lines, good, ran = [], True, False
    for outcome in outcomes(chosen, arguments):
        passed, words = verdict(outcome.status, selected=bool(arguments))
        lines.append(f"{outcome.name:>18}  {words}, {outcome.seconds:.0f} s")
        good, ran = good and passed, ran or outcome.status != NO_TESTS
    print("\n" + "\n".join(lines))
    return 0 if good and ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
