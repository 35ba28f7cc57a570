"""The CUDA driver for the benchmarks: memory, streams, copies, and keeping a device busy.

By ctypes, so that neither CuPy nor torch is needed. WAGMA_CUDA_LIBRARY names another library than
libcuda.so.1; if that is the counting library of `traced`, calls from here are not counted.
"""

from __future__ import annotations

import ctypes
import os
import time

from collectives.memory.plain_device import Address, PlainDevice

# Attributes of `cuDeviceGetAttribute`.
MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR = 16, 39
CAPABILITY = 75, 76
THREADS = 256  # per block, as in the engine


class Device(PlainDevice):
    """A device of this machine, made this thread's current one; memory lives until it is freed.

    Attributes:
        name: the driver's name of the device.
        library, version: the driver's library and version.
    """

    def __init__(self, place):
        super().__init__(place, os.environ.get("TRACED_CUDA"))
        self.check("cuCtxSetCurrent", self.driver.cuCtxSetCurrent(self.context))
        self.library = self.driver._name
        name, version = ctypes.create_string_buffer(200), ctypes.c_int()
        self.call("cuDeviceGetName", name, len(name), self.ordinal)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name = name.value.decode()
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def free(self, address):
        """Free memory that was allocated; the host waits."""
        self.call("cuMemFree_v2", Address(address))

    def remove(self, stream):
        """Remove a stream."""
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def unpin(self, address):
        """Free memory that was pinned; the host waits."""
        self.call("cuMemFreeHost", ctypes.c_void_p(address))

    def free_memory(self):
        """Return the number of free bytes of its memory, None if the driver does not report it."""
        if not hasattr(self.driver, "cuMemGetInfo_v2"):
            return None
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def within(self, target, source, size, stream):
        """Queue a copy from the device's memory to its own."""
        arguments = Address(target), Address(source), ctypes.c_size_t(size)
        self.call("cuMemcpyDtoDAsync_v2", *arguments, ctypes.c_void_p(stream))

    def fill(self, address, size, stream):
        """Queue setting this number of bytes to 0."""
        arguments = Address(address), ctypes.c_ubyte(0), ctypes.c_size_t(size)
        self.call("cuMemsetD8Async", *arguments, ctypes.c_void_p(stream))

    def hold(self, seconds, stream):
        """Queue a sleep of the host, during which the stream waits and the device is idle."""
        sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        microseconds = ctypes.c_void_p(int(seconds * 1e6))
        self.call("cuLaunchHostFunc", ctypes.c_void_p(stream), sleep, microseconds)

    def attribute(self, which):
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, self.ordinal)
        return value.value

    def kernel(self, name):
        """Return one of the collectives' kernels, compiled for the device, or raise CudaError.

        It is a function of the C arguments, the number of elements, and a stream.
        """
        from collectives.memory import nvrtc

        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        code = nvrtc.kernels(tuple(self.attribute(which) for which in CAPABILITY))
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
        most = self.attribute(MULTIPROCESSORS) * (
            self.attribute(THREADS_PER_MULTIPROCESSOR) // THREADS
        )

        def launch(arguments, count, stream):
            arguments = [*arguments, ctypes.c_longlong(count)]
            pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
            grid = min(-(-count // THREADS), most)
            self.call(
                *("cuLaunchKernel", kernel, grid, 1, 1, THREADS, 1, 1, 0, ctypes.c_void_p(stream)),
                *(pointers, None),
            )

        return launch


class Array:
    """A vector of float32 zeros in a device's memory, with the interface of CuPy's arrays."""

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
    """Work to keep a device busy: memory that is filled repeatedly, on a separate stream.

    Collective: ranks measure in turn how long a filling takes, because those that share a device
    would slow each other down.

    Attributes:
        seconds: what a filling takes if nothing else uses the device.

    Args:
        comm: the communicator of the ranks.
        device: the `Device`.
        size: bytes of the memory: the more, the fewer operations are in the queue.
    """

    def __init__(self, comm, device, size):
        self.device, self.size, self.stream = device, size, device.stream()
        self.address = device.allocate(size)
        for rank in range(comm.size):
            if rank == comm.rank:
                self._measure()  # the first one warms up
                self.seconds = self._measure()
            comm.Barrier()

    def _measure(self):
        began = time.perf_counter()
        self.queue(4)
        self.device.synchronize(self.stream)
        return (time.perf_counter() - began) / 4

    def queue(self, count):
        """Queue this number of fillings."""
        for _ in range(count):
            self.device.fill(self.address, self.size, self.stream)

    def queue_for(self, seconds):
        """Queue work that takes this long if nothing else uses the device."""
        self.queue(max(1, round(seconds / self.seconds)))
