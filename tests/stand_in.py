"""Devices without a GPU: `tests/cuda`, the stand-in for the CUDA driver, and arrays on it.

python stand_in.py        # builds it and prints its path, for WAGMA_CUDA_LIBRARY

TEST_CUDA_LIBRARY=libcuda.so.1 has tests run on that driver instead, for benchmarks/gpu.py: those
that neither count, nor let calls fail, nor expect the process to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import typing
from pathlib import Path

import numpy as np
import pytest
from build_once import MEMORY, build_once

from collectives.memory.plain_device import NON_BLOCKING, PlainDevice

SOURCES = Path(__file__).with_name("cuda")
KERNELS = [MEMORY / name for name in ("kernels.cu", "members.h", "numbers.h")]
COMPILE = ["-std=gnu11", "-O2", "-Wall", "-fPIC", "-fvisibility=hidden", "-shared"]
COMPILE += ["-ffp-contract=off", f"-I{MEMORY}"]
# Exit statuses: see stand_in.h.
DISORDER, HOST_ACCESS, MISUSE = 86, 87, 88
# The environment's: a driver to run tests on instead.
INSTEAD = "TEST_CUDA_LIBRARY"
LEGACY = 1
ILLEGAL_ADDRESS = 700

# The file descriptor that mistakes are reported to: pytest's own standard error, where that runs.
reports = 2
# What holds streams of a real driver, or has held them: when they are let go is not waited for.
gates = []


class Counts(typing.NamedTuple):
    """What the stand-in has counted: calls that block the host, copies, and bytes."""

    blocking: int
    copies: int
    pageable: int
    device_bytes: int
    device_peak: int
    pinned_bytes: int
    pinned_peak: int


class NoCompiler(Exception):
    """There is nothing to build the stand-in with."""


@functools.cache
def library() -> str:
    """Build the stand-in where that has not been done, and return its path; or the driver's."""
    return os.environ.get(INSTEAD) or built("stand-in")


def plain_library() -> str:
    """Build one that has no functions beside the driver's: what a real one is to tests."""
    sources = "".join(path.read_text() for path in sorted(SOURCES.glob("*.c")))
    own = sorted(re.findall(r"^API \w+ (stand_in_\w+)\(", sources, re.MULTILINE))
    return built("plain", *(f"-D{name}=plain_{name}" for name in own))


def built(kind, *options):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoCompiler("no C compiler (CC, cc) to build the stand-in for the CUDA driver with")
    files = sorted(SOURCES.glob("*.[ch]"))
    content = repr(
        [compiler, COMPILE, *options, *(file.read_text() for file in [*files, *KERNELS])]
    )
    sources = [file for file in files if file.suffix == ".c"]

    def build(target):
        command = [compiler, *COMPILE, *options, *sources, "-o", target, "-lpthread"]
        subprocess.run(command, check=True)

    return build_once(kind, "libcuda.so.1", content, build)


def require() -> str:
    """Return the stand-in's path; skip the test, saying why, where it cannot be built."""
    try:
        return library()
    except NoCompiler as reason:
        pytest.skip(str(reason))


class Array:
    """A vector in a device's memory, as CuPy's and torch's arrays show theirs.

    Args:
        device: the `Device` that it is on.
        values: 1-D numpy array, which is copied there on its stream.
        stream: the handle that the interface names; None names none.
    """

    def __init__(self, device, values, stream=None):
        self.device, self.dtype, self.size = device, values.dtype, values.size
        self.address = device.allocate(values.nbytes)
        self.stream = stream
        device.write(self, values, stream)

    @property
    def __cuda_array_interface__(self):
        name = self.dtype.name
        return {
            "shape": (self.size,),
            "typestr": "<V2" if name == "bfloat16" else self.dtype.newbyteorder("<").str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.stream,
        }

    def get(self, stream=None):
        """Return its values as they are on a stream, by default its own."""
        return self.device.read(self, self.stream if stream is None else stream)

    def __del__(self):
        # Not at once, which would wait for all streams, some of them held.
        self.device.unused.append(self.address)


class Device(PlainDevice):
    """One of the stand-in's devices, as an application uses it.

    Its `counts()` are those of the whole process.

    Attributes:
        is_stand_in: whether it is one; a real driver's counts are 0.
    """

    def __init__(self, ordinal=0):
        super().__init__(ordinal, os.environ.get("WAGMA_CUDA_LIBRARY") or library())
        self.is_stand_in = hasattr(self.driver, "stand_in_counts")
        self.pinned = {}
        self.streams = []
        self.unused = []
        if self.is_stand_in:
            self.driver.stand_in_report_to(reports)

    def array(self, values, stream=None):
        return Array(self, np.asarray(values), stream)

    def create_stream(self, flags=NON_BLOCKING):
        """Return a stream, until the test ends."""
        self.streams.append(self.stream(flags))
        return self.streams[-1]

    def write(self, array, values, stream=None):
        """Overwrite an array on a stream, as a step of training does; the host does not wait."""
        values = np.ascontiguousarray(values)
        staging = self.pin(values.nbytes)
        ctypes.memmove(staging, values.ctypes.data, values.nbytes)
        self.to_device(array.address, staging, values.nbytes, stream)

    def read(self, array, stream=None):
        """Return an array's values once the stream has come so far; the host waits."""
        values = np.empty(array.size, array.dtype)
        staging = self.pin(values.nbytes)
        self.to_host(staging, array.address, values.nbytes, stream)
        self.synchronize(stream)
        ctypes.memmove(values.ctypes.data, staging, values.nbytes)
        self.free_pinned()
        return values

    def sleep(self, seconds, stream=None):
        """Keep a stream busy for so long."""
        microseconds = int(seconds * 1e6)
        if self.is_stand_in:
            self.call("stand_in_sleep", handle(stream), ctypes.c_long(microseconds))
        else:
            self._let_host("usleep", stream, ctypes.c_void_p(microseconds))

    def hold(self, stream=None):
        """Keep a stream busy until `open` is called."""
        if self.is_stand_in:
            self.call("stand_in_hold", handle(stream))
            return
        gate = ctypes.create_string_buffer(64)  # a semaphore's memory
        ctypes.CDLL(None).sem_init(gate, 0, 0)
        gates.append(gate)
        self._let_host("sem_wait", stream, ctypes.cast(gate, ctypes.c_void_p))

    def _let_host(self, function, stream, argument):
        """Queue a call of a function of the C library's."""
        address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p)
        self.call("cuLaunchHostFunc", handle(stream), address, argument)

    @contextlib.contextmanager
    def holding(self, stream=None):
        """Keep a stream busy until the block ends, or `open` is called in it."""
        self.hold(stream)
        try:
            yield
        finally:
            self.open()

    @contextlib.contextmanager
    def holding_copies(self, number):
        """Let only so many more copies to the host begin, until the block ends or `open` is."""
        self.require_stand_in()
        self.driver.stand_in_hold_copies(ctypes.c_long(number))
        try:
            yield
        finally:
            self.open()

    @contextlib.contextmanager
    def holding_calls(self):
        """Let no call of the driver return in this process, and no stream go on, in the block."""
        self.require_stand_in()
        self.driver.stand_in_hold_calls()
        try:
            yield
        finally:
            self.driver.stand_in_let_calls()

    @contextlib.contextmanager
    def refusing_numbers(self):
        """Support cuStreamWriteValue32 no longer, in the block."""
        self.require_stand_in()
        self.driver.stand_in_refuse_numbers(1)
        try:
            yield
        finally:
            self.driver.stand_in_refuse_numbers(0)

    def open(self):
        """Let all streams that are held go on."""
        if self.is_stand_in:
            self.driver.stand_in_open()
        for gate in gates:
            ctypes.CDLL(None).sem_post(gate)

    def counts(self):
        numbers = (ctypes.c_longlong * len(Counts._fields))()
        if self.is_stand_in:
            self.driver.stand_in_counts(numbers)
        return Counts(*numbers)

    def fail(self, error):
        """Let every call fail like this from now on; 0: none any more."""
        self.require_stand_in()
        self.driver.stand_in_fail(error)

    def limit(self, size):
        """Let devices have no more memory than this many bytes; 0: any."""
        self.require_stand_in()
        self.driver.stand_in_limit(ctypes.c_longlong(size))

    @contextlib.contextmanager
    def capturing(self, stream):
        """A graph is being captured on the stream."""
        self.require_stand_in()
        self.call("stand_in_capture", handle(stream), 1)
        yield
        self.call("stand_in_capture", handle(stream), 0)

    def pin(self, size):
        """Return the address of pinned memory, until the next `read`."""
        address = super().pin(max(size, 1))
        self.pinned[address] = size
        return address

    def reset(self):
        """Leave nothing of what a test has made or set, but its arrays."""
        self.open()
        if self.is_stand_in:
            self.fail(0)
        self.free_pinned()
        self.free_arrays()
        while self.streams:
            self.call("cuStreamDestroy_v2", handle(self.streams.pop()))

    def require_stand_in(self):
        """Skip the test on a real driver."""
        if not self.is_stand_in:
            pytest.skip("what the stand-in alone can do")

    def free_arrays(self):
        """Free the arrays that are used no longer; the host waits."""
        while self.unused:
            self.call("cuMemFree_v2", ctypes.c_ulonglong(self.unused.pop()))

    def free_pinned(self):
        """Free what copies went through; the host waits for them."""
        for address in list(self.pinned):
            self.call("cuMemFreeHost", ctypes.c_void_p(address))
            del self.pinned[address]


@contextlib.contextmanager
def opened_memory():
    """Let the host touch device memory that is allocated in the block: MPI is as if CUDA-aware.

    Not where it is one, and has the stand-in for its driver.
    """
    driver = ctypes.CDLL(os.environ.get("WAGMA_CUDA_LIBRARY") or library())
    driver.stand_in_open_memory(not is_mpi_s_driver())
    try:
        yield
    finally:
        driver.stand_in_open_memory(False)


@contextlib.contextmanager
def mapped_memory():
    """Let processes map each other's device memory in the block."""
    driver = ctypes.CDLL(os.environ.get("WAGMA_CUDA_LIBRARY") or library())
    driver.stand_in_enable_ipc(True)
    try:
        yield
    finally:
        driver.stand_in_enable_ipc(False)


@contextlib.contextmanager
def averaging(monkeypatch, transport):
    """Let devices average vectors in the block.

    By "messages" it is as if MPI were CUDA-aware; "shared", it is not, and processes map each
    other's device memory.
    """
    shared = transport == "shared"
    monkeypatch.setenv("WAGMA_CUDA_AWARE", "0" if shared else "1")
    monkeypatch.setenv("WAGMA_CUDA_BLOCK", str(2**20))  # several, of short vectors
    monkeypatch.setattr("collectives.device._answer", None)
    with mapped_memory() if shared else opened_memory():
        yield


def is_mpi_s_driver() -> bool:
    """Whether a CUDA-aware MPI of this process would find the stand-in (make test-cuda-mpi)."""
    with contextlib.suppress(OSError):
        return hasattr(ctypes.CDLL("libcuda.so.1"), "stand_in_counts")
    return False


def handle(stream):
    return ctypes.c_void_p(stream or 0)


if __name__ == "__main__":
    print(library())
