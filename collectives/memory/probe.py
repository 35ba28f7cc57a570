"""Device memory that an MPI is tried with, by the CUDA driver alone.

    python -m collectives.memory.probe PLACE

sends such memory from a job of one process to itself, and prints what comes of that: an MPI that
crashes or hangs over it does so there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
import time

from collectives.errors import CudaError

__all__ = ["FINE", "SIZES", "VERDICT", "Device", "exchange", "library"]

SIZES = (4 << 10, 8 << 20)  # bytes: of a message that MPI sends at once, and of one in pieces
LIMIT = 10.0  # seconds for a message to arrive
VERDICT, FINE = "verdict: ", "all bytes arrive"
NON_BLOCKING, DISABLE_TIMING = 1, 2
NOT_READY = 600
DEFAULT_STREAM = None  # the legacy default stream

Address = ctypes.c_ulonglong


def library() -> ctypes.CDLL:
    """Load the CUDA driver, and do nothing with it; CudaError where there is none."""
    try:
        return ctypes.CDLL(os.environ.get("WAGMA_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from None


class Device:
    """A device with memory for one message to send and one to receive, until it is closed.

    Attributes:
        sent, received: addresses of as many bytes as the longest message has.
        busy: whether MPI may still use them.

    Args:
        place: this process's among those of its node, which have the devices in turn.

    Raises:
        CudaError: there is no driver or device, or a function fails.
    """

    def __init__(self, place: int):
        self._driver = library()
        self._call("cuInit", 0)
        count, self._context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not count.value:
            raise CudaError("there is no CUDA device")
        ordinal = place % count.value
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self.busy = False
        with self.current():
            self._call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)
            self.sent, self.received = self._allocate(), self._allocate()

    @contextlib.contextmanager
    def current(self):
        """Let this thread's calls be about the device, for a block."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def write(self, address: int, data: bytes):
        """Overwrite memory, and wait until that is done."""
        size = ctypes.c_size_t(len(data))
        self._call("cuMemcpyHtoDAsync_v2", Address(address), data, size, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        count = ctypes.c_size_t(size)
        self._call("cuMemcpyDtoHAsync_v2", data, Address(address), count, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return data.raw

    def hold(self, seconds: float) -> ctypes.c_void_p:
        """Keep the default stream busy for a while, with nothing; return an event that is its end.

        The stream calls the C library's usleep: so no kernel need be compiled, and it takes as long
        on every device.
        """
        sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        stream, event = ctypes.c_void_p(DEFAULT_STREAM), ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)
        self._call("cuLaunchHostFunc", stream, sleep, ctypes.c_void_p(int(seconds * 1e6)))
        self._call("cuEventRecord", event, stream)
        return event

    def is_over(self, event: ctypes.c_void_p) -> bool:
        """Whether an event has been reached, which is asked once."""
        result = self._driver.cuEventQuery(event)
        self._driver.cuEventDestroy_v2(event)
        self._check("cuEventQuery", 0 if result == NOT_READY else result)
        return result != NOT_READY

    def close(self):
        """Give all back, except what MPI may still use: that is the context, too."""
        if self.busy:
            return
        with self.current():
            for address in (self.sent, self.received):
                self._call("cuMemFree_v2", Address(address))
            self._call("cuStreamDestroy_v2", self._stream)

    def _allocate(self) -> int:
        address = Address()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(SIZES)))
        return address.value

    def _call(self, name, *arguments):
        self._check(name, getattr(self._driver, name)(*arguments))

    def _check(self, name, result):
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(result, ctypes.byref(text))
            raise CudaError(f"{name} returned {(text.value or b'an error').decode()}")


def exchange(comm, device: Device, size: int, limit: float, hold: float = 0.0):
    """Send device memory to the next rank and receive the one before's; collective.

    The device is the thread's current one.

    Args:
        size: bytes.
        limit: seconds for it to arrive.
        hold: seconds for which the device's default stream is busy meanwhile.

    Returns:
        What is wrong with what has arrived, or None; whether it has arrived before the hold's end.
    """
    from mpi4py import MPI

    source, target = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    device.write(device.sent, _message(comm.rank, size))
    device.write(device.received, bytes(size))
    event = device.hold(hold) if hold else None
    device.busy = True
    requests = [
        comm.Irecv(_buffer(device.received, size), source),
        comm.Isend(_buffer(device.sent, size), target),
    ]
    deadline = time.monotonic() + limit
    while not MPI.Request.Testall(requests):
        if time.monotonic() > deadline:
            return f"{size} bytes have not arrived after {limit:g} s", False
        time.sleep(0)
    device.busy = False
    early = event is not None and not device.is_over(event)
    if device.read(device.received, size) != _message(source, size):
        return f"of {size} bytes not all arrive as they were sent", early
    return None, early


def _message(rank, size):
    period = 65521  # a prime, so that what arrives at another place is seen
    return (random.Random(rank).randbytes(period) * (size // period + 1))[:size]


def _buffer(address, size):
    from mpi4py import MPI

    return [MPI.buffer.fromaddress(address, size), MPI.BYTE]


def main(place: int):
    # Some MPIs have to find the device when they are initialized.
    device = Device(place)
    from mpi4py import MPI

    with device.current():
        found = [exchange(MPI.COMM_SELF, device, size, LIMIT)[0] for size in SIZES]
    return next(filter(None, found), FINE)


if __name__ == "__main__":
    try:
        verdict = main(int(sys.argv[1]))
    except Exception as error:  # the process that started this one tells the user
        verdict = str(error)
    print(f"\n{VERDICT}{verdict}", flush=True)
