"""What the extensions are built of is free of warnings."""

import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted
import pytest
from build_once import ROOT


@pytest.mark.extra
def test_the_compiler_warns_of_no_module():
    """Of what it sees without optimizing, with the flags of Python's own configuration."""
    generated = sorted(Path(ROOT, "build", "cython").rglob("*.c"))
    if not generated:
        pytest.skip("built elsewhere")
    headers = [f"-I{sysconfig.get_paths()['include']}", *planted.mpi_headers()]
    folders = [f"-I{ROOT / 'collectives' / name}" for name in ("memory", "protocols")]
    flags = shlex.split(sysconfig.get_config_var("CFLAGS"))
    command = ["cc", "-fsyntax-only", "-Wsign-compare", *flags, "-Wall", *headers, *folders]

    def warnings(source):
        checked = subprocess.run([*command, source], capture_output=True, text=True)
        return checked.stderr

    with ThreadPoolExecutor(2) as pool:
        assert "".join(pool.map(warnings, generated)) == ""
