"""`tests/cuda/passes.pyx`: passes over memory, and the kernels that make them, by name."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in
from build_once import ROOT, build_cython

from collectives.errors import CudaError
from collectives.memory import nvrtc

SOURCE = Path(__file__).parent / "cuda" / "passes.pyx"
# Where compiled kernels are kept.
CACHE = ROOT / "build" / "kernels"
# Passes over so many vectors, which write one more; with these shares.
OVER = {"combine": 2, "mean": 4, "add_change": 3}
SHARES = {"combine": (1 / 3, 2 / 3), "mean": (0.5, 0.0, 0.2, 0.3)}
FINITE = {"all_finite": 1, "finite_change": 3}


def build() -> str:
    """Build the module, and return its path; skip the test where it cannot be, or has no NVRTC."""
    try:
        nvrtc.library()
    except CudaError as error:
        pytest.skip(str(error))
    return module()


def module() -> str:
    """Build the module, and return its path; skip the test where it cannot be."""
    return build_cython("passes", SOURCE.read_text(), SOURCE.name, "-O0")


def load(path: str, name: str = "passes"):
    """Return the module that was built."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code: str, **env: str):
    """Run a process on the stand-in, with the path of the module that was built as its argument."""
    env |= {"WAGMA_CUDA_LIBRARY": stand_in.require(), "WAGMA_CACHE_DIR": str(CACHE)}
    path = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, build()],
        cwd=ROOT,
        env={"PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
    )
