"""Passes over memory, and the kernels that make them on devices, for tests to call.

Addresses are integers.
"""

from collectives.memory.device_kernels cimport DeviceKernels, kernels_of
from collectives.memory.driver cimport (
    Address, Context, Handle, INVALID_VALUE, check, context_of, cu, enter, leave, load, note_own_thread)
from collectives.memory.allocation cimport Memory
from collectives.memory.space cimport Space

cdef enum:
    MOST = 300


def kernels(int device):
    """Load a device's kernels once more; CudaError where that cannot be done."""
    load()
    DeviceKernels(context_of(device))


def kernels_without_launches(int device):
    """Likewise, with a driver that has no cuLaunchKernel."""
    load()
    launch = cu.LaunchKernel
    cu.LaunchKernel = NULL
    try:
        DeviceKernels(context_of(device))
    finally:
        cu.LaunchKernel = launch


def launch(name, codes, addresses, long long n, size_t stream, shares=()):
    """Launch a kernel of device 0 on a stream.

    Args:
        codes: of `space.CODES`: the dtype's, and that of what travels.
        addresses: of its vectors, or its flag and vectors, in the order of its arguments.
        n: the elements.
        shares: for a mean or a combination.
    """
    load()
    cdef Context context = context_of(0)
    cdef DeviceKernels kernels = kernels_of(context)
    cdef Address a[MOST]
    cdef double s[MOST]
    cdef int mode
    cdef int result = INVALID_VALUE
    cdef int dtype = ord(codes[0])
    cdef Handle on = <Handle>stream
    for i, address in enumerate(addresses):
        a[i] = address
    for i, share in enumerate(shares):
        s[i] = share
    check(b"cuCtxPushCurrent", enter(context.handle, &mode))
    if name == "all_finite":
        result = kernels.all_finite(dtype, <int *>a[0], a[1], n, on)
    elif name == "finite_change":
        result = kernels.finite_change(dtype, <int *>a[0], a[1], a[2], a[3], n, on)
    elif name == "combine":
        result = kernels.combine(dtype, a[0], a[1], s[0], a[2], s[1], n, on)
    elif name == "mean":
        result = kernels.mean(dtype, a[0], <const char **>&a[1], s, len(shares), n, on)
    elif name == "add_change":
        result = kernels.add_change(dtype, a[0], a[1], a[2], a[3], n, on)
    elif name == "encode":
        result = kernels.encode(dtype, ord(codes[1]), a[0], a[1], a[2], n, on)
    elif name == "decode":
        result = kernels.decode(dtype, ord(codes[1]), a[0], a[1], a[2], n, on)
    leave(mode)
    check(b"cuLaunchKernel", result)


def attach(Space space):
    """Prepare this thread, as if it were the engine's, to pass addresses to MPI."""
    note_own_thread()
    space.attach()


def make(Space space, name, addresses, Py_ssize_t n, shares=()):
    """Make a pass over the first array of a space; return what it does.

    Args:
        addresses: of its vectors, in the order of its arguments.
        n: the elements, or bytes of what is copied.
    """
    cdef const char *a[MOST]
    cdef double s[MOST]
    for i, address in enumerate(addresses):
        a[i] = <const char *><size_t>address
    for i, share in enumerate(shares):
        s[i] = share
    cdef char *to = <char *>a[0]
    if name == "copy":
        space.copy(to, a[1], n)
    elif name == "copy_away":
        space.copy_away(to, a[1], n)
    elif name == "zero":
        space.zero(to, n)
    elif name == "all_finite":
        return space.all_finite(0, to, n)
    elif name == "finite_change":
        return space.finite_change(0, to, a[1], a[2], n)
    elif name == "combine":
        space.combine(0, to, a[1], s[0], a[2], s[1], n)
    elif name == "mean":
        space.mean(0, &to, 1, &a[1], s, len(shares), n)
    elif name == "add_change":
        space.add_change(0, to, a[1], a[2], a[3], n)
    elif name == "begin_all_finite":
        space.begin_all_finite(<int *>to, 0, a[1], n)
    elif name == "begin_finite_change":
        space.begin_finite_change(<int *>to, 0, a[1], a[2], a[3], n)
    elif name == "encode":
        space.encode(0, to, a[1], a[2], n)
    elif name == "decode":
        space.decode(0, to, a[1], a[2], n)
    else:
        raise ValueError(name)


def allocate(Space space, Py_ssize_t size):
    """Return memory, and its address; it is given back when nobody has it."""
    cdef Memory memory = space.allocate(size)
    return memory, <size_t>memory.address


def new_flag(Space space):
    return <size_t>space.new_flag()


def begun(Space space):
    return space.begun()


def over(Space space, long long ticket):
    return space.over(ticket)


def error(Space space):
    return space.error()
