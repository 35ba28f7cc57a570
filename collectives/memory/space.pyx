# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Where vectors are, and all that is done with what is in them: here, the host's memory."""

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from collectives.memory cimport allocation, kernels
from collectives.memory.allocation cimport Memory
from collectives.memory.kernels cimport choose_codec, choose_kernels

# What Python's struct module and our kernels call the dtypes.
CODES = {"float16": b"e", "bfloat16": b"E", "float32": b"f", "float64": b"d"}


cdef class Space:
    """The passes over memory of one kind. Sizes are bytes, and counts are elements of array `i`.

    Passes are made one after the other, in the order in which they are begun. Where they are
    `deferred`, what one writes is there once the ticket is over that `begun` has given after it.
    Those that return something are over then, and with them all before.

    Where a pass fails, all tickets are over, and `error` says so: what passes have written since
    the ticket before is worth nothing then.
    """

    def __cinit__(self, *_):
        self.flags = []

    cdef Memory allocate(self, Py_ssize_t size):
        """Return memory for vectors; MemoryError or CudaError where there is none."""

    cdef Memory export(self, Py_ssize_t size):
        """Likewise, of memory that other processes of the node can map, where passes are deferred."""

    cdef handle_of(self, Memory memory):
        """What they map it by."""

    cdef Memory map(self, handle):
        """Return another process's, which is freed only once this is gone."""

    cdef int *new_flag(self) except NULL:
        """A flag for passes that ask something, there as long as the space."""
        flag = bytearray(sizeof(int))
        self.flags.append(flag)
        return <int *><char *>flag

    cdef int error(self) noexcept nogil:
        """The driver's number of the error with which a pass has failed, or 0."""
        return 0

    cdef void attach(self) noexcept nogil:
        """Let this thread give MPI addresses in this memory."""

    cdef long long begun(self) noexcept nogil:
        """Return a ticket for all passes begun so far."""
        return 0

    cdef bint over(self, long long ticket) noexcept nogil:
        """Whether the passes that a ticket is for are over."""
        return True

    cdef void copy(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        """Copy what will be used soon."""

    cdef void copy_away(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        """Copy so much that it would only push other data out of the caches."""

    cdef void zero(self, char *to, Py_ssize_t size) noexcept nogil:
        """to = 0"""

    cdef void combine(
        self, int i, char *to, const char *a, double share_a, const char *b, double share_b,
        Py_ssize_t count
    ) noexcept nogil:
        """to = share_a · a + share_b · b; `to` may be one of them."""

    cdef void mean(
        self, int i, char *to, const char **vectors, const double *shares, int size,
        Py_ssize_t count
    ) noexcept nogil:
        """to = Σ shares · vectors; a vector with share 0 is not read, and `to` may be one."""

    cdef void add_change(
        self, int i, char *to, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        """to = snapshot + (x − returned)"""

    cdef bint all_finite(self, int i, const char *x, Py_ssize_t count) noexcept nogil:
        """Whether all of x is finite."""

    cdef bint finite_change(
        self, int i, const char *snapshot, const char *x, const char *returned, Py_ssize_t count
    ) noexcept nogil:
        """Whether snapshot + (x − returned) is finite."""

    cdef void begin_all_finite(
        self, int *flag, int i, const char *x, Py_ssize_t count
    ) noexcept nogil:
        """flag = 0 unless all of x is finite; 1 before, and left alone until a ticket is over."""

    cdef void begin_finite_change(
        self, int *flag, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        """Likewise, unless snapshot + (x − returned) is finite."""

    cdef void encode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        """to = source − reference, as the dtype that travels."""

    cdef void decode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        """to = reference + source, of the dtype that travels."""


cdef class HostSpace(Space):
    """The host's memory: a pass is over when its function returns.

    Args:
        dtypes: names of the arrays' dtypes.
        sent: names of those that travel in their place.
    """

    def __init__(self, dtypes, sent):
        cdef int i
        self.kernels = <Kernels *>calloc(len(dtypes), sizeof(Kernels))
        self.codecs = <Codec *>calloc(len(dtypes), sizeof(Codec))
        if self.kernels == NULL or self.codecs == NULL:
            raise MemoryError
        for i in range(len(dtypes)):
            choose_kernels(&self.kernels[i], ord(CODES[dtypes[i]]))
            choose_codec(&self.codecs[i], ord(CODES[dtypes[i]]), ord(CODES[sent[i]]))

    def __dealloc__(self):
        free(self.kernels)
        free(self.codecs)

    cdef Memory allocate(self, Py_ssize_t size):
        cdef Memory memory = Memory()
        memory.address = allocation.allocate(size)
        return memory

    cdef void copy(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        memcpy(to, source, size)

    cdef void copy_away(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        kernels.copy_away(to, source, size)

    cdef void zero(self, char *to, Py_ssize_t size) noexcept nogil:
        memset(to, 0, size)

    cdef void combine(
        self, int i, char *to, const char *a, double share_a, const char *b, double share_b,
        Py_ssize_t count
    ) noexcept nogil:
        self.kernels[i].combine(to, a, share_a, b, share_b, count)

    cdef void mean(
        self, int i, char *to, const char **vectors, const double *shares, int size,
        Py_ssize_t count
    ) noexcept nogil:
        self.kernels[i].mean(to, vectors, shares, size, count)

    cdef void add_change(
        self, int i, char *to, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        self.kernels[i].add_change(to, snapshot, x, returned, count)

    cdef bint all_finite(self, int i, const char *x, Py_ssize_t count) noexcept nogil:
        return self.kernels[i].all_finite(x, count)

    cdef bint finite_change(
        self, int i, const char *snapshot, const char *x, const char *returned, Py_ssize_t count
    ) noexcept nogil:
        return self.kernels[i].finite_change(snapshot, x, returned, count)

    cdef void begin_all_finite(
        self, int *flag, int i, const char *x, Py_ssize_t count
    ) noexcept nogil:
        if not self.kernels[i].all_finite(x, count):
            flag[0] = 0

    cdef void begin_finite_change(
        self, int *flag, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        if not self.kernels[i].finite_change(snapshot, x, returned, count):
            flag[0] = 0

    cdef void encode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        self.codecs[i].encode(to, source, reference, count)

    cdef void decode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        self.codecs[i].decode(to, source, reference, count)


# What makes the spaces of vectors; a test puts another in its place.
make = HostSpace
