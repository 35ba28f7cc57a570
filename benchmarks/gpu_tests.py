"""The suite's tests that can run with a real driver, as parts of gpu.py."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_paths import why_not_mapped
from gpu_processes import keep

TESTS = Path(__file__).resolve().parent.parent / "tests"
LIMIT = 60  # seconds of a test
PLUGINS = "pytest_mpi", "timeout"
PYTEST_ENDED = 0, 1, 5  # its exit statuses where tests pass, some fail, or there are none
# By number of ranks and path: files, and those of their tests that neither count the driver's
# calls, nor make it fail, nor expect the process to end.
ALONE = (
    ("test_cuda_kernels.py", "test_device_kernels.py", "test_device_space.py"),
    "compile or kept or alike or same or hosts_bits or not_finite or too_many or ticket or members",
)
ONE_RANK = ("test_device_arrays_mpi.py",), ""
BITS = "bits_of_the_host or not_finite or holds_nobody_up or queued_next"
STAGED = (
    ("test_device_mpi.py",),
    f"{BITS} or start_returns or next_call or close_carries or pairs_average",
)
DIRECT = ("test_device_direct_mpi.py",), f"{BITS} or exception"


def environment(aware=False):
    """Return the variables that make tests use the benchmark's driver instead of the stand-in.

    Args:
        aware: whether MPI takes device memory.
    """
    driver = os.environ.get("WAGMA_CUDA_LIBRARY") or "libcuda.so.1"
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]
    return {
        "TEST_CUDA_LIBRARY": driver,
        "WAGMA_CUDA_AWARE": str(int(aware)),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others that this machine has might not load
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def tests(comm, device, arguments):
    """Run the tests of one process, or those of this number of ranks with staged vectors."""
    run = Runs(comm, arguments)
    if comm.size > 1:
        run("staged", STAGED)
    else:
        run("without MPI", ALONE, mpi=False)
        run("one rank", ONE_RANK)
    return counted(run.results), {}


def direct_tests(comm, device, arguments):
    """Run the tests in which devices average, by the ways in which they can here."""
    why_not = {
        "messages": None if os.environ.get("WAGMA_CUDA_AWARE") == "1" else "MPI is not CUDA-aware",
        "shared": why_not_mapped(comm, device),
    }
    run = Runs(comm, arguments)
    for way, reason in why_not.items():
        files, names = DIRECT
        if reason:
            run.results[way] = {"not measured": reason}
        else:
            run(way, (files, f"({names}) and {way}"))
    return counted(run.results), {}


def counted(results):
    """Return the results with figures: no test may fail."""
    failed = {
        f"tests, {name}: failed": len(each["failed"])
        for name, each in results.items()
        if "failed" in each
    }
    return {**results, "figures": {name: (count, 0) for name, count in failed.items()}}


class Runs:
    """Runs tests in this process.

    Attributes:
        results: {name: number of tests that passed, and reports of the others}, or why none ran.

    Args:
        comm: the communicator of the ranks, which all run the same tests.
        arguments: those of gpu.py.
    """

    def __init__(self, comm, arguments):
        self.comm, self.arguments, self.results = comm, arguments, {}

    def __call__(self, name, selected, mpi=True):
        """Run tests, given by files and names, and add their results under a name.

        Args:
            mpi: whether they are those that are marked as tests of MPI, or those that are not.
        """

        def keep_so_far(outcomes):
            keep(self.comm, self.arguments, {**self.results, name: outcomes})

        self.results[name] = run(selected, mpi, self.arguments.tests, Found(keep_so_far))


def run(selected, mpi, more_names, found):
    """Run tests; return their results.

    Args:
        selected: files, and names as pytest's -k takes them.
        mpi: see `Runs`.
        more_names: further names, which are to hold as well; empty: all.
        found: the `Found` to record them.
    """
    try:
        import pytest
    except ImportError as error:
        return {"not measured": str(error)}
    files, names = selected
    if more_names:
        names = f"({names}) and ({more_names})" if names else more_names
    options = ["--with-mpi", "-m", "mpi"] if mpi else ["-m", "not mpi"]
    here = os.getcwd()
    os.chdir(TESTS.parent)
    try:
        status = pytest.main(
            [
                *options,
                *(word for name in PLUGINS for word in ("-p", name)),
                *("-p", "no:faulthandler"),  # the driver has its handler of faults already
                *("-q", "-p", "no:cacheprovider", "--timeout-method=thread", f"--timeout={LIMIT}"),
                *("-k", names, *(str(TESTS / name) for name in files)),
            ],
            plugins=[found],
        )
    finally:
        os.chdir(here)
    if status not in PYTEST_ENDED:
        raise RuntimeError(f"pytest ended with exit status {int(status)}")
    if not found.passed and not found.failed:
        reasons = sorted(set(found.skipped.values()))
        return {"not measured": "; ".join(reasons) or "no such tests"}
    results = {"passed": len(found.passed), "failed": found.failed, "skipped": found.skipped}
    return {"exit status": int(status), **results}


class Found:
    """A pytest plugin that records the tests' outcomes.

    Args:
        keep: function that is given, as each test begins, the outcomes of those before.
    """

    def __init__(self, keep):
        self.keep = keep
        self.passed, self.failed, self.skipped = [], {}, {}

    def pytest_runtest_logstart(self, nodeid):
        self.keep({"passed": len(self.passed), "failed": self.failed, "begun": nodeid})

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-2000:]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-2000:]
        elif report.skipped:
            # A skip is a file, a line, and a reason.
            self.skipped[report.nodeid] = report.longrepr[-1]
        elif report.when == "call":
            self.passed.append(report.nodeid)
