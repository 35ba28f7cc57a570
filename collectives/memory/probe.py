"""Tests an MPI with device memory, by the CUDA driver alone.

    python -m collectives.memory.probe PLACE

sends device memory from a job of one process to itself, and prints the result. An MPI that crashes
or hangs does so in this process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
import time
from pathlib import Path

from collectives.memory.plain_device import Address, PlainDevice

__all__ = ["FINE", "SIZES", "VERDICT", "Device", "exchange"]

SIZES = (4 << 10, 8 << 20)  # bytes: of a message that MPI sends at once, and of one in pieces
LIMIT = 10.0  # seconds for a message to arrive
VERDICT, FINE = "verdict: ", "all bytes arrive"
DISABLE_TIMING = 2
DEFAULT_STREAM = None  # the legacy default stream


class Device(PlainDevice):
    """A device with memory for one message to send and one to receive, until it is closed.

    Attributes:
        sent, received: addresses of as many bytes as the longest message has.
        busy: whether MPI may still use that memory.

    Args:
        place: see `PlainDevice`.

    Raises:
        CudaError: there is no driver or device, or a function fails.
    """

    def __init__(self, place: int):
        super().__init__(place)
        self.busy = False
        self._stream = self.stream()
        self.sent, self.received = self.allocate(max(SIZES)), self.allocate(max(SIZES))

    def write(self, address: int, data: bytes):
        """Overwrite memory and wait until that is complete."""
        memory = ctypes.create_string_buffer(data, len(data))
        self.to_device(address, ctypes.addressof(memory), len(data), self._stream)
        self.synchronize(self._stream)

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.to_host(ctypes.addressof(data), address, size, self._stream)
        self.synchronize(self._stream)
        return data.raw

    def hold(self, seconds: float) -> ctypes.c_void_p:
        """Occupy the default stream for a while; return an event that marks the end.

        The stream calls the C library's usleep: that needs no kernel, and takes the same time on
        every device.
        """
        sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        stream, event = ctypes.c_void_p(DEFAULT_STREAM), ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)
        self.call("cuLaunchHostFunc", stream, sleep, ctypes.c_void_p(int(seconds * 1e6)))
        self.call("cuEventRecord", event, stream)
        return event

    def has_ended(self, event: ctypes.c_void_p) -> bool:
        """Return whether an event has been reached, and destroy the event."""
        ended = self.is_over(event)
        self.call("cuEventDestroy_v2", event)
        return ended

    def close(self):
        """Free everything, unless MPI may still use it; then the context must stay, too."""
        if self.busy:
            return
        for address in (self.sent, self.received):
            self.call("cuMemFree_v2", Address(address))
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(self._stream))


def exchange(comm, device: Device, size: int, limit: float, hold: float = 0.0):
    """Send device memory to the next rank and receive the previous rank's; collective.

    The device's context must be current on this thread.

    Args:
        size: bytes.
        limit: seconds for it to arrive.
        hold: seconds for which the device's default stream is busy meanwhile.

    Returns:
        What is wrong with the message received, or None; whether it arrived before the hold's end.
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
    early = event is not None and not device.has_ended(event)
    if device.read(device.received, size) != _message(source, size):
        return f"not all of {size} bytes arrive as sent", early
    return None, early


def _message(rank, size):
    period = 65521  # a prime, so that bytes that arrive at another offset are detected
    return (random.Random(rank).randbytes(period) * (size // period + 1))[:size]


def _buffer(address, size):
    from mpi4py import MPI

    return [MPI.buffer.fromaddress(address, size), MPI.BYTE]


def _segments() -> set[str]:
    """Return the files in shared memory that this process has mapped, except CUDA's."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # only Linux has it
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in maps}
    return {path for path in paths if path.startswith("/dev/shm/") and "cuda" not in path}


def main(place: int):
    # Some MPIs must find the device when they are initialized.
    device = Device(place)
    before = _segments()
    from mpi4py import MPI

    # An MPI that crashes would leave its segments behind; only this process maps them.
    for path in _segments() - before:
        with contextlib.suppress(OSError):
            os.unlink(path)
    with device.current():
        found = [exchange(MPI.COMM_SELF, device, size, LIMIT)[0] for size in SIZES]
    return next(filter(None, found), FINE)


if __name__ == "__main__":
    try:
        verdict = main(int(sys.argv[1]))
    except Exception as error:  # the process that started this one tells the user
        verdict = str(error)
    print(f"\n{VERDICT}{verdict}", flush=True)
