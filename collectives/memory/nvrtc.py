"""The passes over vectors on devices, compiled by NVRTC for the device at hand.

NVRTC is a library that comes with the CUDA toolkit, with PyTorch for CUDA, or alone (`pip install
nvidia-cuda-nvrtc`). It is loaded when something is compiled, and needs neither a GPU nor a driver.
It makes machine code for one compute capability: its PTX would be refused by a driver older than
NVRTC. The code is cached for other ranks and later jobs. Of several NVRTCs, one whose version of
CUDA the driver supports is preferred.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

from collectives.errors import CudaError
from collectives.memory import plain_device

__all__ = ["compiled", "kernels"]

HERE = Path(__file__).parent
SOURCE = HERE / "kernels.cu"
HEADERS = ("members.h", "numbers.h")
# No fused multiply-add: the bits are those of the passes on the host (see setup.py).
OPTIONS = ("--std=c++17", "--fmad=false")
VERSIONS = (13, 12)  # of its ABI, as in the libraries' names; the newest first
# The PyPI packages that contain it.
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc")


def kernels(capability: tuple[int, int]) -> bytes:
    """Return the machine code of all kernels for devices of a compute capability, such as (9, 0).

    The code is cached in $WAGMA_CACHE_DIR, or else wagma/ in $XDG_CACHE_HOME or ~/.cache, by a hash
    of its sources.

    Raises:
        CudaError: there is no NVRTC, or it does not support such devices.
    """
    nvrtc = library()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *OPTIONS]
    files = SOURCE.read_bytes(), {name: (HERE / name).read_bytes() for name in HEADERS}
    content = hashlib.sha256(repr([version_of(nvrtc), options, *files]).encode())
    kept = cache() / f"kernels-{content.hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    made = compiled(nvrtc, *files, options)
    # If it cannot be cached it is compiled again. All ranks of a job may write it at once.
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(made)
        os.replace(file.name, kept)
    return made


def cache() -> Path:
    """Return the directory in which compiled kernels are cached."""
    if named := os.environ.get("WAGMA_CACHE_DIR"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wagma"
    except RuntimeError:  # this user has no home, and nothing is cached
        return Path(os.devnull)


def library() -> ctypes.CDLL:
    """Load NVRTC: $WAGMA_NVRTC_LIBRARY, a package's, or one that the loader finds."""
    if named := os.environ.get("WAGMA_NVRTC_LIBRARY"):
        candidates = [named]
    else:
        names = [f"libnvrtc.so.{version}" for version in VERSIONS]
        packaged = [folder / "lib" / name for name in names for folder in folders()]
        candidates = [*(str(path) for path in packaged if path.exists()), *names]
        # A driver loads code that was made for its version of CUDA, or an older one.
        newest = newest_loaded()
        candidates.sort(key=lambda path: int(path.rpartition(".")[2]) > newest)
    problems = []
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            problems.append(str(error))
    raise CudaError(f"no NVRTC to compile kernels with: {'; '.join(problems)}")


def newest_loaded() -> int:
    """Return the newest version of CUDA that the driver supports; without it, the newest known."""
    version = ctypes.c_int()
    with contextlib.suppress(CudaError, AttributeError):
        plain_device.library().cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000 or max(VERSIONS)


def folders():
    """Yield the folders of packages that may contain NVRTC."""
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            found = importlib.util.find_spec(package)
            yield from map(Path, found.submodule_search_locations if found else ())


def version_of(nvrtc) -> tuple[int, int]:
    """Return an NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc, "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compiled(nvrtc, source: bytes, headers: dict[str, bytes], options) -> bytes:
    """Return the machine code of a source and its headers; raise CudaError with the compile log."""
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    check(
        *(nvrtc, "nvrtcCreateProgram", ctypes.byref(program), source, SOURCE.name.encode()),
        *(len(headers), texts, names),
    )
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        try:
            check(nvrtc, "nvrtcCompileProgram", program, len(options), words)
        except CudaError as error:
            said = text(nvrtc, program, "nvrtcGetProgramLog").rstrip(b"\0").decode().strip()
            raise CudaError(f"{error} for {' '.join(options)}: {said}") from None
        return text(nvrtc, program, "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def text(nvrtc, program, what) -> bytes:
    """Return a program's code or log, by the NVRTC function `what`."""
    size = ctypes.c_size_t()
    check(nvrtc, f"{what}Size", program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    check(nvrtc, what, program, made)
    return made.raw


def check(nvrtc, function, *arguments):
    """Call a function of NVRTC; if it fails, raise CudaError that names it and the error."""
    result = getattr(nvrtc, function)(*arguments)
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaError(f"{function} returned {nvrtc.nvrtcGetErrorString(result).decode()}")
