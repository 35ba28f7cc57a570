"""Memory of a device, private or shared with other processes of the node.

Sharing uses CUDA's interprocess communication (IPC). The device does not order the work of two
processes on shared memory: each waits until its own is complete before it tells the other.
"""

from libc.string cimport memcmp, memcpy

from collectives.memory.allocation cimport fails, round_up
from collectives.memory.device_kernels cimport DeviceKernels, kernels_of
from collectives.memory.driver cimport (
    OUT_OF_MEMORY,
    SUCCESS,
    Address,
    Context,
    Handle,
    IpcHandle,
    PinnedMemory,
    check,
    check_for_ipc,
    context_of,
    create_stream,
    cu,
    enter,
    leave,
    load,
)

from collectives.memory import device_caches

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef enum:
    # The driver shares pieces of this size whole, with any other allocations in them.
    PIECE = 2097152
    # So that processes with other devices can use the memory, too.
    LAZY_PEER_ACCESS = 1


cdef class DeviceMemory(Memory):
    """Memory of a device; the host waits for the device when it is freed.

    If there is too little, torch and CuPy first free what they only cache.

    Args:
        size: bytes.
        context: the device's context.

    Raises:
        CudaError: there is no memory left.
    """

    def __init__(self, Py_ssize_t size, Context context):
        cdef Address address
        cdef int result
        self.current = context.handle
        self.pid = getpid()
        result = self._allocate(size, &address)
        if result == OUT_OF_MEMORY:
            device_caches.empty()
            result = self._allocate(size, &address)
        check(b"cuMemAlloc", result)
        self.address = <char *>address

    cdef int _allocate(self, Py_ssize_t size, Address *address) noexcept:
        cdef int mode
        cdef int result = enter(self.current, &mode)
        if result == SUCCESS:
            result = OUT_OF_MEMORY if fails() else cu.MemAlloc(address, size)
            leave(mode)
        return result

    def __dealloc__(self):
        cdef int mode
        # A forked child has the address, but cannot use the driver.
        if (self.address != NULL and self.pid == getpid()
                and enter(self.current, &mode) == SUCCESS):
            with nogil:
                if self.mapped:
                    cu.IpcCloseMemHandle(<Address>self.address)
                else:
                    cu.MemFree(<Address>self.address)
            leave(mode)
        self.address = NULL  # not the host's to free


cdef class ExportedMemory(DeviceMemory):
    """Memory of a device that other processes can map by its `handle`, bytes.

    It must not be freed while another process has it mapped: see `MappedMemory`.

    Args, raises: see `DeviceMemory`; also raises CudaError if the driver lacks IPC.
    """

    def __init__(self, Py_ssize_t size, Context context):
        cdef IpcHandle handle
        cdef int mode
        check_for_ipc()
        DeviceMemory.__init__(self, round_up(size, PIECE), context)
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            check(b"cuIpcGetMemHandle", cu.IpcGetMemHandle(&handle, <Address>self.address))
        finally:
            leave(mode)
        self.name = (<char *>&handle)[:sizeof(handle)]

    @property
    def handle(self):
        """The argument by which another process of this node maps the memory."""
        return self.name


cdef class MappedMemory(DeviceMemory):
    """Another process's exported memory, mapped as long as this object lives.

    Args:
        handle: the `ExportedMemory`'s handle.
        context: that of the device that uses it.

    Raises:
        CudaError: it cannot be mapped.
    """

    def __init__(self, bytes handle, Context context):
        cdef IpcHandle copied
        cdef Address address
        cdef int mode
        check_for_ipc()
        memcpy(&copied, <const char *>handle, sizeof(copied))
        self.current = context.handle
        self.pid = getpid()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            check(b"cuIpcOpenMemHandle", cu.IpcOpenMemHandle(&address, copied, LAZY_PEER_ACCESS))
        finally:
            leave(mode)
        self.address = <char *>address
        self.mapped = True


def export(int device, bytes content):
    """Return an `ExportedMemory` of a device with this content; wait for the copy."""
    load()
    cdef Context context = context_of(device)
    cdef ExportedMemory memory = ExportedMemory(len(content), context)
    cdef PinnedMemory pinned = PinnedMemory(len(content), context)
    memcpy(pinned.address, <const char *>content, len(content))
    _copy(context, memory, pinned, True)
    return memory


def write_by_kernel(int device, bytes handle, Py_ssize_t offset, bytes numbers):
    """Map another process's memory, and let a kernel write float32 numbers there; wait for it."""
    cdef Context context = context_of(device)
    cdef DeviceKernels kernels = kernels_of(context)
    cdef MappedMemory memory = MappedMemory(handle, context)
    cdef DeviceMemory source = DeviceMemory(len(numbers), context)
    cdef PinnedMemory pinned = PinnedMemory(len(numbers), context)
    cdef Address address = <Address>source.address
    cdef Handle stream
    cdef int mode
    memcpy(pinned.address, <const char *>numbers, len(numbers))
    _copy(context, source, pinned, True)
    check(b"cuCtxPushCurrent", enter(context.handle, &mode))
    try:
        create_stream(&stream)
        try:
            check(b"cuLaunchKernel", kernels.combine(
                c"f", <Address>memory.address + offset, address, 1, address, 0,
                len(numbers) // 4, stream))
            check(b"cuStreamSynchronize", cu.StreamSynchronize(stream))
        finally:
            cu.StreamDestroy(stream)
    finally:
        leave(mode)


def content_of(ExportedMemory memory, int device, Py_ssize_t size):
    """Return the first bytes of this process's exported memory; wait for the copy."""
    cdef Context context = context_of(device)
    cdef PinnedMemory pinned = PinnedMemory(size, context)
    _copy(context, memory, pinned, False)
    return pinned.address[:size]


def holds(int device, bytes handle, bytes content):
    """Map another process's memory, and return whether it begins with `content`."""
    cdef Context context = context_of(device)
    cdef MappedMemory memory = MappedMemory(handle, context)
    cdef PinnedMemory pinned = PinnedMemory(len(content), context)
    _copy(context, memory, pinned, False)
    return memcmp(pinned.address, <const char *>content, len(content)) == 0


cdef int _copy(Context context, Memory memory, PinnedMemory pinned, bint to_device) except -1:
    """Copy `pinned.size` bytes to or from the device and wait for the copy."""
    cdef Handle stream
    cdef int mode
    check(b"cuCtxPushCurrent", enter(context.handle, &mode))
    try:
        create_stream(&stream)
        try:
            if to_device:
                check(b"cuMemcpyHtoDAsync", cu.MemcpyHtoDAsync(
                    <Address>memory.address, pinned.address, pinned.size, stream))
            else:
                check(b"cuMemcpyDtoHAsync", cu.MemcpyDtoHAsync(
                    pinned.address, <Address>memory.address, pinned.size, stream))
            check(b"cuStreamSynchronize", cu.StreamSynchronize(stream))
        finally:
            cu.StreamDestroy(stream)
    finally:
        leave(mode)
    return 0
