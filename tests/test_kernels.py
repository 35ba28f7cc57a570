"""The passes over vectors are vectorized: as built, they have instructions for several numbers."""

import platform
import re
import shutil
import subprocess

import pytest

from collectives.memory import space

objdump = shutil.which("objdump")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not objdump, reason="needs objdump on x86-64"
)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
PASSES = ["combine", "mean", "add_change", "all_finite", "finite_change", "take_change"]
CODECS = [f"float{bits}_{wire}" for bits in (32, 64) for wire in ("float16", "bfloat16")]
# Arithmetic on, comparison and conversion of several single or double precision numbers.
PACKED = re.compile(
    r"\sv?(add|sub|mul|cmp\w*|cvt\w+)p[sd]\s|\sv?cvtp[sd]2p[sd]|\sv?p(add|sub|or|and|cmpeq)[dw]\s"
)


def functions(module):
    """{name: its instructions}, of a module's passes for processors with AVX2, or for any."""
    listing = subprocess.run(
        [objdump, "--disassemble", "--no-show-raw-insn", module.__file__],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = re.findall(r"^\w+ <(\w+)(?:\.avx2)?>:\n(.*?)(?:\n\n|\Z)", listing, re.M | re.S)
    return dict(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_pass_is_vectorized(dtype):
    code = functions(space)
    for name in PASSES:
        assert len(PACKED.findall(code[f"{name}_{dtype}"])) >= 1, name


@pytest.mark.parametrize("codec", CODECS)
def test_each_codec_is_vectorized(codec):
    code = functions(space)
    for name in ("encode", "decode"):
        assert len(PACKED.findall(code[f"{name}_{codec}"])) >= 1, name
