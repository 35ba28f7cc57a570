"""The CUDA driver: loaded when a vector on a device is first used, and not needed before.

WAGMA_CUDA_LIBRARY names another library than libcuda.so.1.
"""

import ctypes
import os

from cpython.buffer cimport PyBuffer_FillInfo

from collectives.memory.allocation cimport fails

from collectives.errors import CudaError

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef extern from *:
    """
    static __thread int is_own_thread, is_relaxed;
    """
    int is_own_thread, is_relaxed

# In the order of `Functions`, as the library exports them.
NAMES = (
    "cuInit",
    "cuGetErrorName",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuStreamQuery",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuPointerGetAttribute",
    "cuMemsetD32Async",
)

# Functions that can be replaced by others, next in `Functions`.
OPTIONAL = ("cuStreamWriteValue32_v2",)

# Functions that only kernels need, next in `Functions`.
OF_KERNELS = (
    "cuDeviceGetAttribute",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemsetD8Async",
    "cuMemcpyDtoDAsync_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
)

# Functions that only other processes' memory needs, last in `Functions`.
OF_IPC = ("cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle")

# The library, once it is loaded, and the primary contexts of the devices used so far.
_library = None
_contexts = {}


cdef int load() except -1:
    """Load the driver unless it is loaded; raise CudaError if there is none that works."""
    global _library
    cdef void **table = <void **>&cu
    cdef size_t address
    if _library is not None:
        return 0
    path = os.environ.get("WAGMA_CUDA_LIBRARY") or "libcuda.so.1"
    try:
        library = ctypes.CDLL(path)
        found = [getattr(library, name) for name in NAMES]
    except (OSError, AttributeError) as error:
        raise CudaError(f"no CUDA driver: {error}") from None
    found += [getattr(library, name, None) for name in (*OPTIONAL, *OF_KERNELS, *OF_IPC)]
    for i, function in enumerate(found):
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        table[i] = <void *>address
    check(b"cuInit", cu.Init(0))
    _library = library
    return 0


cdef int check_for_kernels() except -1:
    """Raise CudaError if the driver, which is loaded, lacks functions that kernels need."""
    return _check_for(OF_KERNELS, len(NAMES) + len(OPTIONAL))


cdef int check_for_ipc() except -1:
    """Raise CudaError if the driver lacks functions that other processes' memory needs."""
    return _check_for(OF_IPC, len(NAMES) + len(OPTIONAL) + len(OF_KERNELS))


cdef int _check_for(names, int first) except -1:
    cdef void **table = <void **>&cu
    for i, name in enumerate(names):
        if table[first + i] == NULL:
            raise CudaError(f"{_library._name} has no {name}")
    return 0


cdef int check(const char *function, int result) except -1 nogil:
    """Raise CudaError if a function of the driver has not succeeded."""
    if result != SUCCESS:
        with gil:
            raise CudaError(f"{function.decode()} returned {name_of(result)}")
    return 0


def name_of(int result):
    """Return the driver's name of a result."""
    cdef const char *name = NULL
    if cu.GetErrorName(result, &name) != SUCCESS or name == NULL:
        return f"error {result}"
    return name.decode()


cdef int device_of(Address address) except? -1:
    """Return the device whose memory contains this address; raise ValueError if none's does."""
    cdef unsigned memory = 0
    cdef int device = 0
    cdef int result = cu.PointerGetAttribute(&memory, MEMORY_TYPE, address)
    if result == INVALID_VALUE or result == SUCCESS and memory != IN_DEVICE_MEMORY:
        raise ValueError(f"{address:#x} is not an address in a device's memory")
    check(b"cuPointerGetAttribute", result)
    check(b"cuPointerGetAttribute", cu.PointerGetAttribute(&device, DEVICE_ORDINAL, address))
    return device


cdef class Context:
    """A device's primary context, which applications use as well; retained until process exit."""


cdef Context context_of(int device):
    """Return the primary context of a device."""
    cdef Context context
    if device not in _contexts:
        context = Context()
        context.device = device
        check(b"cuDevicePrimaryCtxRetain", cu.DevicePrimaryCtxRetain(&context.handle, device))
        _contexts[device] = context
    return _contexts[device]


cdef int enter(Handle context, int *mode) noexcept nogil:
    """Make a context current on this thread until `leave`; return the driver's result.

    The thread's calls use streams that are in no graph. In another capture mode than the one set
    here, they would break a graph that any thread is capturing.
    """
    cdef int result = cu.CtxPushCurrent(context)
    if result == SUCCESS:
        mode[0] = RELAXED
        cu.ThreadExchangeStreamCaptureMode(mode)
    return result


cdef void leave(int mode) noexcept nogil:
    """Restore the thread's context, and the capture mode that `enter` has stored."""
    cdef Handle left
    cu.ThreadExchangeStreamCaptureMode(&mode)
    cu.CtxPopCurrent(&left)


cdef void note_own_thread() noexcept nogil:
    """Note that this thread is not the application's: see `relax_own_thread`."""
    global is_own_thread
    is_own_thread = 1


cdef void relax_own_thread() noexcept nogil:
    """In a thread of the engine's, let MPI's CUDA calls break no graph that is being captured."""
    global is_relaxed
    cdef int mode = RELAXED
    if is_own_thread and not is_relaxed:
        is_relaxed = cu.ThreadExchangeStreamCaptureMode(&mode) == SUCCESS


cdef int create_stream(Handle *stream) except -1:
    """Create a stream of highest priority that does not synchronize with the default stream."""
    cdef int lowest, highest
    check(b"cuCtxGetStreamPriorityRange", cu.CtxGetStreamPriorityRange(&lowest, &highest))
    return check(b"cuStreamCreate", cu.StreamCreateWithPriority(stream, NON_BLOCKING, highest))


cdef int create_event(Handle *event) except -1:
    """Create an event without timing."""
    return check(b"cuEventCreate", cu.EventCreate(event, DISABLE_TIMING))


cdef class PinnedMemory:
    """Pinned host memory, for asynchronous copies from and to a device; it exports a buffer.

    Args:
        size: bytes, uninitialized.
        context: the device's context.

    Raises:
        CudaError: there is no memory left.
    """

    def __init__(self, Py_ssize_t size, Context context):
        cdef int mode
        self.size = size
        self.current = context.handle
        self.pid = getpid()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            check(b"cuMemHostAlloc", OUT_OF_MEMORY if fails() else cu.MemHostAlloc(
                <void **>&self.address, size, 0))
        finally:
            leave(mode)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.address, self.size, 0, flags)

    def __dealloc__(self):
        cdef int mode
        # A forked child has the memory, but cannot use the driver.
        if (self.address != NULL and self.pid == getpid()
                and enter(self.current, &mode) == SUCCESS):
            with nogil:
                cu.MemFreeHost(self.address)
            leave(mode)
