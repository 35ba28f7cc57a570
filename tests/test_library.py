"""The extensions and mpi4py on different MPIs: every rank says so, and what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import collectives

pytestmark = pytest.mark.launch

ROOT = Path(__file__).parent.parent
OTHER_MPI = """
#include <string.h>
#include "mpi.h"
int MPI_Get_library_version(char *version, int *length)
{
    strcpy(version, "Other MPI 1.0\\nand its second line");
    *length = (int)strlen(version);
    return 0;
}
"""
JOB = """
import numpy as np
from mpi4py import MPI
from collectives import GroupAllreduce

comm = MPI.COMM_WORLD
try:
    GroupAllreduce(comm, np.zeros(10), group_size=2)
except ImportError as error:
    everyone = comm.gather(str(error))
    if comm.rank == 0:
        assert len(set(everyone)) == 1, everyone
        print(everyone[0])
        print(MPI.Get_library_version())
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Return a directory with the package as an MPI of ours builds it, and that MPI's library."""
    place = tmp_path_factory.mktemp("other")
    (place / "mpi.h").write_text(
        "#define MPI_MAX_LIBRARY_VERSION_STRING 256\n"
        "int MPI_Get_library_version(char *version, int *length);\n"
    )
    (place / "other.c").write_text(OTHER_MPI)
    library = ["cc", "-shared", "-fPIC", "other.c", "-o", "libother_mpi.so"]
    subprocess.run(library, cwd=place, check=True)
    compiler = place / "mpicc"
    compiler.write_text(f"#!/bin/sh\necho cc -I'{place}' -L'{place}' -lother_mpi\n")
    compiler.chmod(0o755)
    build(place, compiler)
    package = Path(collectives.__file__).parent
    for path in (*package.iterdir(), *(package / "engine").iterdir()):
        mine = place / "collectives" / path.relative_to(package)
        if not mine.exists() and path.suffix != ".pyx":
            mine.symlink_to(path)
    (place / "job.py").write_text(JOB)
    return place


def build(place, compiler):
    """Build, of the extensions, the one that tells the library's version; that takes one line."""
    (place / "collectives" / "engine").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "build_backend/wagma_build.py"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    shutil.copy(ROOT / "collectives/engine/library.pyx", place / "collectives/engine")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    env = {**os.environ, "MPICC": str(compiler)}
    built = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built
    assert built.stdout == "Building wagma: 2 modules\n"


def refusal(mpirun, place, **variables):
    """Return what the ranks, who must agree, are told, and the name of mpi4py's MPI."""
    lines = mpirun(3, place / "job.py", timeout=100, env=variables).check().stdout.splitlines()
    assert len(lines) >= 2, "nobody was refused"
    return lines[0], lines[1].strip("\0 ")


def test_extensions_of_another_mpi_are_refused_with_both_names(mpirun, other):
    message, running = refusal(mpirun, other, LD_LIBRARY_PATH=str(other))
    assert f"built for Other MPI 1.0, but mpi4py runs on {running}; " in message
    assert "build wagma again with the mpicc of mpi4py's MPI" in message


def test_extensions_of_an_mpi_that_is_not_here_are_refused_with_its_name(mpirun, other):
    message, running = refusal(mpirun, other)
    assert f"built for another MPI than mpi4py's {running}: libother_mpi.so: cannot open" in message
    assert "build wagma again with the mpicc of mpi4py's MPI" in message
