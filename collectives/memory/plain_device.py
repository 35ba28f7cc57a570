"""A CUDA device through the driver alone, by ctypes, for uses that need not be fast.

Neither the engine's binding nor a CUDA library is loaded, only libcuda.so.1 or the library named by
WAGMA_CUDA_LIBRARY.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

from collectives.errors import CudaError

__all__ = ["NON_BLOCKING", "Address", "PlainDevice", "library"]

NON_BLOCKING = 1
NOT_READY = 600

Address = ctypes.c_ulonglong


def library(path: str | None = None) -> ctypes.CDLL:
    """Load the CUDA driver without initializing it; raise CudaError if there is none."""
    try:
        return ctypes.CDLL(path or os.environ.get("WAGMA_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from None


class PlainDevice:
    """A device's memory, streams and copies, in its primary context.

    Addresses and stream handles are integers, sizes are in bytes, and stream None is the legacy
    default stream. Methods raise CudaError if a function of the driver fails.

    Attributes:
        driver: the library.
        ordinal: the device's number.
        context: its primary context.

    Args:
        place: this process's index among those of its node, which use the devices in turn.
        path: the driver's path, if it is not the default.

    Raises:
        CudaError: there is no driver or device, or a function fails.
    """

    def __init__(self, place: int, path: str | None = None):
        self.driver = library(path)
        self.check("cuInit", self.driver.cuInit(0))
        count, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.check("cuDeviceGetCount", self.driver.cuDeviceGetCount(ctypes.byref(count)))
        if not count.value:
            raise CudaError("there is no CUDA device")
        self.ordinal = place % count.value
        retained = self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), self.ordinal)
        self.check("cuDevicePrimaryCtxRetain", retained)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current on this thread for a block."""
        self.check("cuCtxPushCurrent", self.driver.cuCtxPushCurrent_v2(self.context))
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver in the device's context."""
        with self.current():
            self.check(name, getattr(self.driver, name)(*arguments))

    def check(self, name: str, result: int) -> None:
        """Raise CudaError if a function has not returned success."""
        if result:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorName(result, ctypes.byref(text))
            raise CudaError(f"{name} returned {(text.value or b'an error').decode()}")

    def allocate(self, size: int) -> int:
        """Return the address of new memory, to be freed by cuMemFree."""
        address = Address()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def pin(self, size: int) -> int:
        """Return the address of new pinned host memory, to be freed by cuMemFreeHost."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
        return address.value  # type: ignore[return-value]

    def stream(self, flags: int = NON_BLOCKING) -> int:
        """Return a new stream."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), flags)
        return stream.value  # type: ignore[return-value]

    def to_host(self, host: int, address: int, size: int, stream: int | None) -> None:
        """Queue a copy to the host's memory."""
        sizes = ctypes.c_size_t(size), ctypes.c_void_p(stream)
        self.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), Address(address), *sizes)

    def to_device(self, address: int, host: int, size: int, stream: int | None) -> None:
        """Queue a copy from the host's memory."""
        sizes = ctypes.c_size_t(size), ctypes.c_void_p(stream)
        self.call("cuMemcpyHtoDAsync_v2", Address(address), ctypes.c_void_p(host), *sizes)

    def synchronize(self, stream: int | None = None) -> None:
        """Wait until all work queued on a stream is complete."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def is_over(self, event: ctypes.c_void_p) -> bool:
        """Return whether an event has been reached, without waiting."""
        with self.current():
            result = self.driver.cuEventQuery(event)
        self.check("cuEventQuery", result if result != NOT_READY else 0)
        return result != NOT_READY
