"""Exchanges whose passes over memory are deferred: nothing is sent before it is written."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCE = HERE / "late" / "late_space.pyx"
MEMORY = ROOT / "collectives" / "memory"


@pytest.fixture(scope="module")
def extension():
    """Build the memory whose passes are deferred, where that has not been done."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or importlib.util.find_spec("Cython") is None:
        pytest.skip("no C compiler or no Cython to build memory with deferred passes with")
    content = [sys.version, *(path.read_text() for path in [SOURCE, *sorted(MEMORY.glob("*.pxd"))])]
    digest = hashlib.sha256("".join(content).encode()).hexdigest()[:16]
    target = ROOT / "build" / "late" / digest / "late_space.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        generated, built = target.with_suffix(".c"), target.with_suffix(f".{os.getpid()}")
        translate = [sys.executable, "-m", "cython", "-3", "-I", ROOT, "-o", generated]
        subprocess.run([*translate, SOURCE], check=True)
        headers = [f"-I{sysconfig.get_paths()['include']}", f"-I{MEMORY}"]
        options = ["-w", "-O1", "-fPIC", "-shared", "-ffp-contract=off", *headers]
        subprocess.run([compiler, *options, generated, "-o", built], check=True)
        os.replace(built, target)
    return target


def differing(mpirun, *arguments):
    """Return how many calls gave other bits than without deferring, and how many passes were."""
    ended = mpirun(4, "-W", "ignore", HERE / "late" / "job.py", *arguments, timeout=100).check()
    found = re.fullmatch(r"(\d+) calls differ, (\d+) passes deferred\n", ended.stdout)
    return map(int, found.groups())


@pytest.mark.launch
def test_averages_have_the_same_bits(mpirun, extension):
    calls, passes = differing(mpirun, extension)
    assert (calls, passes > 2_000) == (0, True)


@pytest.mark.launch
def test_sending_too_early_is_seen(mpirun, extension):
    """Where tickets are said to be over before they are."""
    calls, _ = differing(mpirun, extension, "lying")
    assert calls > 10
