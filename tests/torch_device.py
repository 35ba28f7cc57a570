"""torch's device on the stand-in for the CUDA driver: `cuda/torch_device.cpp`, built and loaded.

python torch_device.py        # builds it and prints its path

It is called "standin", a backend of torch's own kind PrivateUse1.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import stand_in
import torch
from build_once import build_once

SOURCE = Path(__file__).with_name("cuda") / "torch_device.cpp"
COMPILE = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared"]  # -O0: built in a third of the time


@functools.cache
def library() -> str:
    """Build the device where that has not been done, and return its path."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise stand_in.NoCompiler("no C++ compiler (CXX, c++) to build torch's test device with")
    home = Path(torch.__file__).parent
    headers = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    libraries = [f"-L{home}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]

    def build(target):
        command = [compiler, *COMPILE, abi, *headers, SOURCE, *libraries, "-o", target]
        subprocess.run(command, check=True)

    content = repr([compiler, COMPILE, torch.__version__, SOURCE.read_text()])
    return build_once("torch-device", "torch_device.so", content, build)


class Module:
    """What torch asks a backend's module for, as it asks `torch.cuda`."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    device = staticmethod(lambda device: contextlib.nullcontext())
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=0: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=0: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream())
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize())
    empty_cache = staticmethod(lambda: load().torch_device_empty_cache())


@functools.cache
def load():
    """Register the device with torch, once a process, and return its library."""
    driver = stand_in.library()
    os.environ["WAGMA_CUDA_LIBRARY"] = driver
    loaded = ctypes.CDLL(library())
    loaded.torch_device_start.restype = ctypes.c_char_p
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", Module())
    torch.utils.generate_methods_for_privateuse1_backend()
    error = loaded.torch_device_start(driver.encode())
    if error:
        raise RuntimeError(f"torch's test device: {error.decode()}")
    return loaded


def build():
    """Build the device, for other processes; skip the test, saying why, where it cannot be."""
    try:
        stand_in.library()
        library()
    except stand_in.NoCompiler as reason:
        pytest.skip(str(reason))


def require() -> torch.device:
    """Return the device; skip the test, saying why, where it cannot be built."""
    build()
    load()
    return torch.device("standin", 0)


class Counts(NamedTuple):
    """What has been counted in this process so far.

    Attributes:
        reads: how often the program has read a tensor of the device on the host.
        blocking: how often it, or what it has called, has blocked the host in another function of
            the driver's.
        bytes, peak: of tensors' memory now, and at most since `reset_peak`.
        pinned: bytes of pinned memory, but for what operators are run with.
    """

    reads: int
    blocking: int
    bytes: int
    peak: int
    pinned: int


def counts() -> Counts:
    """Return what has been counted; what the device does to run operators on the CPU is not."""
    numbers = (ctypes.c_longlong * 5)()
    load().torch_device_counts(numbers)
    reads, waits, pinned, now, peak = numbers
    of_all = (ctypes.c_longlong * len(stand_in.Counts._fields))()
    ctypes.CDLL(stand_in.library()).stand_in_counts(of_all)
    driver = stand_in.Counts(*of_all)
    return Counts(reads, driver.blocking - waits, now, peak, driver.pinned_bytes - pinned)


def reset_peak():
    """Let the peak be what there is now."""
    load().torch_device_reset_peak()


def reads() -> int:
    """Return how often the program has read a tensor of the device on the host."""
    return counts().reads


if __name__ == "__main__":
    print(library())
