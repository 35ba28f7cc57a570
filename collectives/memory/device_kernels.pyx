"""The kernels of kernels.cu on a device: compiled for it, loaded, and launched."""

from libc.string cimport memset

from collectives.memory.driver cimport (
    CAPABILITY_MAJOR,
    CAPABILITY_MINOR,
    INVALID_VALUE,
    MULTIPROCESSORS,
    NON_BLOCKING,
    SUCCESS,
    THREADS_PER_MULTIPROCESSOR,
    Address,
    Context,
    Handle,
    check,
    check_for_kernels,
    cu,
    enter,
    leave,
)

from collectives.memory import nvrtc

cdef enum:
    # Threads per block.
    THREADS = 256
    # Where the kernels of each pass begin in `NAMES`.
    ALL_FINITE = 0
    FINITE_CHANGE = 4
    COMBINE = 8
    MEAN = 12
    ADD_CHANGE = 16
    ALL_BOUNDED = 20
    ENCODE = 24
    DECODE = 28

PASSES = ("all_finite", "finite_change", "combine", "mean", "add_change", "all_bounded")
WIDE, HALVES = ("float32", "float64"), ("float16", "bfloat16")
NAMES = (
    *(f"{name}_{dtype}" for name in PASSES for dtype in (*WIDE, *HALVES)),
    *(f"{name}_{dtype}_{wire}"
      for name in ("encode", "decode") for dtype in WIDE for wire in HALVES),
)

# The `DeviceKernels` of each device whose kernels are loaded.
_loaded = {}


def most_members():
    """Return the largest number of vectors of a mean."""
    return MOST_MEMBERS


cdef DeviceKernels kernels_of(Context context):
    """Return a device's kernels, loaded once; raise CudaError if that fails or NVRTC is missing."""
    if context.device not in _loaded:
        _loaded[context.device] = DeviceKernels(context)
    return _loaded[context.device]


cdef inline int _dtype(int code) noexcept nogil:
    """Return a dtype's index among all four."""
    return 0 if code == c"f" else 1 if code == c"d" else 2 + _half(code)


cdef inline int _half(int code) noexcept nogil:
    """Return a dtype's index among fp16 and bf16, which can be sent in place of wider ones."""
    return code == c"E"


cdef class DeviceKernels:
    """The passes over vectors of one device, launched in streams of its context: see `Space`.

    Dtypes are the characters of `space.CODES`; n is a number of elements, and may be 0. Addresses
    are in the device's memory. The functions return the driver's result, and do not wait for the
    stream. The context must be current: see `driver.enter`.

    Args:
        context: the device's context.

    Raises:
        CudaError: a function of the driver fails or is missing; or there is no NVRTC, or it does
            not support such devices.
    """

    def __init__(self, Context context):
        cdef int major, minor, processors, threads, mode, i
        cdef int device = context.device
        cdef Handle module
        self.context = context
        check_for_kernels()
        check(b"cuDeviceGetAttribute", cu.DeviceGetAttribute(&major, CAPABILITY_MAJOR, device))
        check(b"cuDeviceGetAttribute", cu.DeviceGetAttribute(&minor, CAPABILITY_MINOR, device))
        check(b"cuDeviceGetAttribute", cu.DeviceGetAttribute(
            &processors, MULTIPROCESSORS, device))
        check(b"cuDeviceGetAttribute", cu.DeviceGetAttribute(
            &threads, THREADS_PER_MULTIPROCESSOR, device))
        self.most_blocks = processors * (threads // THREADS)
        code = nvrtc.kernels((major, minor))
        check(b"cuCtxPushCurrent", enter(context.handle, &mode))
        try:
            check(b"cuModuleLoadData", cu.ModuleLoadData(&module, <const char *>code))
            for i in range(COUNT):
                name = NAMES[i].encode()
                check(b"cuModuleGetFunction", cu.ModuleGetFunction(
                    &self.kernels[i], module, <const char *>name))
            self._launch_each_once()
        finally:
            leave(mode)

    cdef int _launch_each_once(self) except -1:
        """Launch each kernel without work: a first launch loads it, and stalls other work."""
        cdef Members nothing
        cdef void *arguments[6]
        cdef Handle stream
        cdef int i
        memset(&nothing, 0, sizeof(nothing))
        for i in range(6):
            arguments[i] = &nothing
        check(b"cuStreamCreate", cu.StreamCreateWithPriority(&stream, NON_BLOCKING, 0))
        try:
            for i in range(COUNT):
                check(b"cuLaunchKernel", cu.LaunchKernel(
                    self.kernels[i], 1, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL))
            check(b"cuStreamSynchronize", cu.StreamSynchronize(stream))
        finally:
            cu.StreamDestroy(stream)
        return 0

    cdef int _launch(
        self, int kernel, void **arguments, long long n, Handle stream
    ) noexcept nogil:
        if n <= 0:
            return SUCCESS
        return cu.LaunchKernel(
            self.kernels[kernel],
            <unsigned>min((n + THREADS - 1) // THREADS, self.most_blocks), 1, 1, THREADS, 1, 1,
            0, stream, arguments, NULL)

    cdef int all_finite(
        self, int dtype, int *flag, Address x, long long n, Handle stream
    ) noexcept nogil:
        """flag = 0 unless all of x is finite; it is in pinned memory and must be 1 before."""
        return self._of_one(ALL_FINITE + _dtype(dtype), flag, x, n, stream)

    cdef int all_bounded(
        self, int dtype, int *flag, Address x, long long n, Handle stream
    ) noexcept nogil:
        """flag = 0 unless x + (y − x) is finite for all finite y; pinned, and 1 before.

        It may also become 0 for some large x for which that holds.
        """
        return self._of_one(ALL_BOUNDED + _dtype(dtype), flag, x, n, stream)

    cdef int _of_one(
        self, int kernel, int *flag, Address x, long long n, Handle stream
    ) noexcept nogil:
        cdef void *arguments[3]
        arguments[0], arguments[1], arguments[2] = &flag, &x, &n
        return self._launch(kernel, arguments, n, stream)

    cdef int finite_change(
        self, int dtype, int *flag, Address snapshot, Address x, Address returned, long long n,
        Handle stream
    ) noexcept nogil:
        """flag = 0 unless snapshot + (x − returned) is finite; pinned, and 1 before."""
        return self._of_change(
            FINITE_CHANGE + _dtype(dtype), <Address>flag, snapshot, x, returned, n, stream)

    cdef int combine(
        self, int dtype, Address to, Address a, double share_a, Address b, double share_b,
        long long n, Handle stream
    ) noexcept nogil:
        """to = share_a · a + share_b · b; `to` may be one of them."""
        cdef void *arguments[6]
        arguments[0], arguments[1], arguments[2] = &to, &a, &share_a
        arguments[3], arguments[4], arguments[5] = &b, &share_b, &n
        return self._launch(COMBINE + _dtype(dtype), arguments, n, stream)

    cdef int mean(
        self, int dtype, Address to, const char **vectors, const double *shares, int size,
        long long n, Handle stream
    ) noexcept nogil:
        """to = Σ shares · vectors; a vector with share 0 is not read, and `to` may be one.

        `vectors` and `shares` are read before the function returns. More than MOST_MEMBERS nonzero
        shares give INVALID_VALUE.
        """
        cdef Members members
        cdef void *arguments[3]
        cdef int member
        members.count = 0
        for member in range(size):
            if shares[member] == 0:
                continue
            if members.count == MOST_MEMBERS:
                return INVALID_VALUE
            members.vectors[members.count] = vectors[member]
            members.shares[members.count] = shares[member]
            members.count += 1
        arguments[0], arguments[1], arguments[2] = &to, &members, &n
        return self._launch(MEAN + _dtype(dtype), arguments, n, stream)

    cdef int add_change(
        self, int dtype, Address to, Address snapshot, Address x, Address returned, long long n,
        Handle stream
    ) noexcept nogil:
        """to = snapshot + (x − returned)"""
        return self._of_change(
            ADD_CHANGE + _dtype(dtype), to, snapshot, x, returned, n, stream)

    cdef int _of_change(
        self, int kernel, Address to, Address snapshot, Address x, Address returned, long long n,
        Handle stream
    ) noexcept nogil:
        cdef void *arguments[5]
        arguments[0], arguments[1], arguments[2] = &to, &snapshot, &x
        arguments[3], arguments[4] = &returned, &n
        return self._launch(kernel, arguments, n, stream)

    cdef int encode(
        self, int dtype, int wire, Address to, Address source, Address reference, long long n,
        Handle stream
    ) noexcept nogil:
        """to = source − reference, in the dtype sent."""
        return self._code(
            ENCODE + 2 * _dtype(dtype) + _half(wire), to, source, reference, n, stream)

    cdef int decode(
        self, int dtype, int wire, Address to, Address source, Address reference, long long n,
        Handle stream
    ) noexcept nogil:
        """to = reference + source, where source is in the dtype sent."""
        return self._code(
            DECODE + 2 * _dtype(dtype) + _half(wire), to, source, reference, n, stream)

    cdef int _code(
        self, int kernel, Address to, Address source, Address reference, long long n,
        Handle stream
    ) noexcept nogil:
        cdef void *arguments[4]
        arguments[0], arguments[1], arguments[2], arguments[3] = &to, &source, &reference, &n
        return self._launch(kernel, arguments, n, stream)
