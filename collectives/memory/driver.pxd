# An address in a device's memory; a context, stream, event, module or kernel.
ctypedef unsigned long long Address
ctypedef void *Handle

cdef enum:
    # Results; all but the first two are errors.
    SUCCESS = 0
    NOT_READY = 600
    DEINITIALIZED = 4
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_SUPPORTED = 801
    CAPTURE_IMPLICIT = 906
    # Flags of streams and events.
    NON_BLOCKING = 1
    DISABLE_TIMING = 2
    # Attributes of `PointerGetAttribute`.
    MEMORY_TYPE = 2
    DEVICE_ORDINAL = 9
    IN_DEVICE_MEMORY = 2
    # Attributes of `DeviceGetAttribute`.
    MULTIPROCESSORS = 16
    THREADS_PER_MULTIPROCESSOR = 39
    CAPABILITY_MAJOR = 75
    CAPABILITY_MINOR = 76
    # The capture mode in which graphs being captured do not restrict a thread.
    RELAXED = 2

# The handle by which another process maps memory.
cdef struct IpcHandle:
    char name[64]

cdef struct Functions:
    int (*Init)(unsigned) noexcept nogil
    int (*GetErrorName)(int, const char **) noexcept nogil
    int (*DevicePrimaryCtxRetain)(Handle *, int) noexcept nogil
    int (*CtxPushCurrent)(Handle) noexcept nogil
    int (*CtxPopCurrent)(Handle *) noexcept nogil
    int (*CtxGetStreamPriorityRange)(int *, int *) noexcept nogil
    int (*StreamCreateWithPriority)(Handle *, unsigned, int) noexcept nogil
    int (*StreamDestroy)(Handle) noexcept nogil
    int (*StreamSynchronize)(Handle) noexcept nogil
    int (*StreamWaitEvent)(Handle, Handle, unsigned) noexcept nogil
    int (*ThreadExchangeStreamCaptureMode)(int *) noexcept nogil
    int (*StreamIsCapturing)(Handle, int *) noexcept nogil
    int (*EventCreate)(Handle *, unsigned) noexcept nogil
    int (*EventDestroy)(Handle) noexcept nogil
    int (*EventRecord)(Handle, Handle) noexcept nogil
    int (*StreamQuery)(Handle) noexcept nogil
    int (*MemHostAlloc)(void **, size_t, unsigned) noexcept nogil
    int (*MemFreeHost)(void *) noexcept nogil
    int (*MemcpyDtoHAsync)(void *, Address, size_t, Handle) noexcept nogil
    int (*MemcpyHtoDAsync)(Address, const void *, size_t, Handle) noexcept nogil
    int (*PointerGetAttribute)(void *, int, Address) noexcept nogil
    int (*MemsetD32Async)(Address, unsigned, size_t, Handle) noexcept nogil
    # NULL if the driver lacks it.
    int (*StreamWriteValue32)(Handle, Address, unsigned, unsigned) noexcept nogil
    # NULL if the driver lacks them: see `check_for_kernels`.
    int (*DeviceGetAttribute)(int *, int, int) noexcept nogil
    int (*ModuleLoadData)(Handle *, const void *) noexcept nogil
    int (*ModuleGetFunction)(Handle *, Handle, const char *) noexcept nogil
    int (*LaunchKernel)(
        Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle,
        void **, void **) noexcept nogil
    int (*MemAlloc)(Address *, size_t) noexcept nogil
    int (*MemFree)(Address) noexcept nogil
    int (*MemsetD8Async)(Address, unsigned char, size_t, Handle) noexcept nogil
    int (*MemcpyDtoDAsync)(Address, Address, size_t, Handle) noexcept nogil
    int (*CtxGetCurrent)(Handle *) noexcept nogil
    int (*CtxSetCurrent)(Handle) noexcept nogil
    # NULL if the driver lacks them: see `check_for_ipc`.
    int (*IpcGetMemHandle)(IpcHandle *, Address) noexcept nogil
    int (*IpcOpenMemHandle)(Address *, IpcHandle, unsigned) noexcept nogil
    int (*IpcCloseMemHandle)(Address) noexcept nogil

# The driver's functions, once `load` was called.
cdef Functions cu

cdef int load() except -1
cdef int check_for_kernels() except -1
cdef int check_for_ipc() except -1
cdef int check(const char *function, int result) except -1 nogil
cdef int device_of(Address address) except? -1

cdef class Context:
    cdef readonly int device
    cdef Handle handle

cdef Context context_of(int device)
cdef int enter(Handle context, int *mode) noexcept nogil
cdef void leave(int mode) noexcept nogil
cdef void note_own_thread() noexcept nogil
cdef void relax_own_thread() noexcept nogil
cdef int create_stream(Handle *stream) except -1
cdef int create_event(Handle *event) except -1

cdef class PinnedMemory:
    cdef readonly Py_ssize_t size
    cdef char *address
    cdef Handle current
    cdef int pid
