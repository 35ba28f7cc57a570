"""Setuptools' build backend; brings its own MPI compiler where the machine has none."""

import os
import shutil
import sys
from pathlib import Path

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "find_mpicc",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def find_mpicc():
    """Return the path of the MPI compiler: $MPICC, else beside this Python, else on PATH."""
    if named := os.environ.get("MPICC"):
        if found := shutil.which(named):
            return found
        sys.exit(f"wagma: MPICC={named} is not an executable")
    return shutil.which(Path(sys.prefix) / "bin" / "mpicc") or shutil.which("mpicc")


def get_requires_for_build_wheel(config_settings=None):
    # Setuptools' own hook would run setup.py, which needs the compiler that is asked for here.
    return [] if find_mpicc() else ["mpich"]


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel
