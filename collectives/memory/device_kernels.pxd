from collectives.memory.driver cimport Address, Context, Handle

cdef extern from "members.h" nogil:
    enum:
        MOST_MEMBERS
    ctypedef struct Members:
        const void *vectors[MOST_MEMBERS]
        double shares[MOST_MEMBERS]
        int count

cdef enum:
    COUNT = 32

cdef class DeviceKernels:
    cdef Context context
    # Thread blocks that fill the device.
    cdef long long most_blocks
    # In the order of `NAMES`.
    cdef Handle kernels[COUNT]

    cdef int all_finite(
        self, int dtype, int *flag, Address x, long long n, Handle stream) noexcept nogil
    cdef int all_bounded(
        self, int dtype, int *flag, Address x, long long n, Handle stream) noexcept nogil
    cdef int finite_change(
        self, int dtype, int *flag, Address snapshot, Address x, Address returned, long long n,
        Handle stream) noexcept nogil
    cdef int combine(
        self, int dtype, Address to, Address a, double share_a, Address b, double share_b,
        long long n, Handle stream) noexcept nogil
    cdef int mean(
        self, int dtype, Address to, const char **vectors, const double *shares, int size,
        long long n, Handle stream) noexcept nogil
    cdef int add_change(
        self, int dtype, Address to, Address snapshot, Address x, Address returned, long long n,
        Handle stream) noexcept nogil
    cdef int encode(
        self, int dtype, int wire, Address to, Address source, Address reference, long long n,
        Handle stream) noexcept nogil
    cdef int decode(
        self, int dtype, int wire, Address to, Address source, Address reference, long long n,
        Handle stream) noexcept nogil
    cdef int _of_one(
        self, int kernel, int *flag, Address x, long long n, Handle stream) noexcept nogil
    cdef int _of_change(
        self, int kernel, Address to, Address snapshot, Address x, Address returned, long long n,
        Handle stream) noexcept nogil
    cdef int _code(
        self, int kernel, Address to, Address source, Address reference, long long n,
        Handle stream) noexcept nogil
    cdef int _launch(
        self, int kernel, void **arguments, long long n, Handle stream) noexcept nogil
    cdef int _launch_each_once(self) except -1

cdef DeviceKernels kernels_of(Context context)
