"""CUDA's driver as the benchmarks use it: memory, streams, copies, and keeping a device busy.

By ctypes, so that neither CuPy nor torch need be there.
"""

from __future__ import annotations

import ctypes
import time

from collectives.memory.plain_device import Address, PlainDevice


class Device(PlainDevice):
    """A device of this machine, this thread's current one, whose memory is never freed.

    Attributes:
        name: what the driver calls it.
        library, version: the driver's.
    """

    def __init__(self, place):
        super().__init__(place)
        self.check("cuCtxSetCurrent", self.driver.cuCtxSetCurrent(self.context))
        self.library = self.driver._name
        name, version = ctypes.create_string_buffer(200), ctypes.c_int()
        self.call("cuDeviceGetName", name, len(name), self.ordinal)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name = name.value.decode()
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def free_memory(self):
        """Return how many bytes of its memory are free, None where the driver does not say."""
        if not hasattr(self.driver, "cuMemGetInfo_v2"):
            return None
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def fill(self, address, size, stream):
        """Queue that so many bytes become 0."""
        arguments = Address(address), ctypes.c_ubyte(0), ctypes.c_size_t(size)
        self.call("cuMemsetD8Async", *arguments, ctypes.c_void_p(stream))


class Array:
    """A vector of float32 zeros in a device's memory, as CuPy's arrays show theirs."""

    def __init__(self, device, count, stream):
        self.count, self.stream = count, stream
        self.address = device.allocate(4 * count)
        device.fill(self.address, 4 * count, stream)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": (self.count,),
            "typestr": "<f4",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.stream,
        }


class Work:
    """What keeps a device busy: memory that is filled again and again, on a stream of its own.

    Args:
        device: the `Device`.
        size: bytes of it: the more, the fewer operations are in the queue.
    """

    def __init__(self, device, size):
        self.device, self.size, self.stream = device, size, device.stream()
        self.address = device.allocate(size)
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            self.queue(4)
            device.synchronize(self.stream)
            self.seconds = (time.perf_counter() - began) / 4

    def queue(self, count):
        """Queue so many fillings."""
        for _ in range(count):
            self.device.fill(self.address, self.size, self.stream)

    def queue_for(self, seconds):
        """Queue what takes so long, if nothing else uses the device."""
        self.queue(max(1, round(seconds / self.seconds)))
