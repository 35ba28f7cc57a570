"""The memory that holds vectors, and the passes over it: the interface, and the host's memory."""

from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from collectives.memory cimport allocation, kernels
from collectives.memory.allocation cimport Memory, zeroed
from collectives.memory.kernels cimport choose_codec, choose_kernels

# The codes of the dtypes in Python's struct module and in the kernels.
CODES = {"float16": b"e", "bfloat16": b"E", "float32": b"f", "float64": b"d"}


cdef class Space:
    """The passes over memory of one kind. Sizes are bytes, and counts are elements of array `i`.

    Passes run one after the other, in the order in which they are begun. If they are `deferred`, a
    pass is complete once a ticket that `begun` returned after it is `over`. A pass that returns a
    value is complete on return, and so are all passes before it.

    If a pass fails, all tickets are over and `error` reports it: what passes have written since
    the previous ticket is then invalid.
    """

    def __cinit__(self, *_):
        self.flags = []

    cdef Memory allocate(self, Py_ssize_t size):
        """Return memory for vectors; raise MemoryError or CudaError if there is none."""

    cdef Memory export(self, Py_ssize_t size):
        """Return memory that other processes of the node can map; only if passes are deferred."""

    cdef handle_of(self, Memory memory):
        """Return the handle by which other processes map exported memory."""

    cdef Memory map(self, handle):
        """Map another process's exported memory, which must outlive the object returned."""

    cdef int *new_flag(self) except NULL:
        """Return a flag for the passes that test something; it lives as long as the space."""
        flag = bytearray(sizeof(int))
        self.flags.append(flag)
        return <int *><char *>flag

    cdef int error(self) noexcept nogil:
        """Return the driver's error number if a pass has failed, or 0."""
        return 0

    cdef void attach(self) noexcept nogil:
        """Prepare this thread to pass addresses in this memory to MPI."""

    cdef long long begun(self) noexcept nogil:
        """Return a ticket for all passes begun so far."""
        return 0

    cdef bint over(self, long long ticket) noexcept nogil:
        """Return whether all passes before a ticket are complete, or one has failed."""
        return True

    cdef void copy(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        """Copy data that will be used soon."""

    cdef void copy_away(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        """Copy data so long that it would only evict other data from the caches."""

    cdef void zero(self, char *to, Py_ssize_t size) noexcept nogil:
        """to = 0"""

    cdef void combine(
        self, int i, char *to, const char *a, double share_a, const char *b, double share_b,
        Py_ssize_t count
    ) noexcept nogil:
        """to = share_a · a + share_b · b; `to` may be one of them."""

    cdef void mean(
        self, int i, char **to, int takers, const char **vectors, const double *shares, int size,
        Py_ssize_t count
    ) noexcept nogil:
        """Each of `to` = Σ shares · vectors; each may be one, and share 0 is not read."""

    cdef void add_change(
        self, int i, char *to, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        """to = snapshot + (x − returned)"""

    cdef bint all_finite(self, int i, const char *x, Py_ssize_t count) noexcept nogil:
        """Return whether all elements of x are finite."""

    cdef bint finite_change(
        self, int i, const char *snapshot, const char *x, const char *returned, Py_ssize_t count
    ) noexcept nogil:
        """Return whether all elements of snapshot + (x − returned) are finite."""

    cdef bint take_change(
        self, int i, char *x, const char *snapshot, char *returned, Py_ssize_t count
    ) noexcept nogil:
        """x and returned = snapshot + (x − returned); return whether that is finite.

        Only where passes are not deferred.
        """
        return False

    cdef void begin_all_finite(
        self, int *flag, int i, const char *x, Py_ssize_t count
    ) noexcept nogil:
        """Set flag, which is 1, to 0 unless all of x is finite; valid when a ticket is over."""

    cdef void begin_finite_change(
        self, int *flag, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        """Set flag to 0 unless snapshot + (x − returned) is finite; see `begin_all_finite`."""

    cdef void encode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        """to = source − reference, in the dtype sent."""

    cdef void decode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        """to = reference + source, where source is in the dtype sent."""


cdef class HostSpace(Space):
    """The host's memory: a pass is complete when its function returns.

    Args:
        dtypes: names of the arrays' dtypes.
        sent: names of the dtypes sent in their place.
    """

    def __init__(self, dtypes, sent):
        cdef int i
        self.kernels = <Kernels *>zeroed(len(dtypes), sizeof(Kernels))
        self.codecs = <Codec *>zeroed(len(dtypes), sizeof(Codec))
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
        self, int i, char **to, int takers, const char **vectors, const double *shares, int size,
        Py_ssize_t count
    ) noexcept nogil:
        self.kernels[i].mean(to, takers, vectors, shares, size, count)

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

    cdef bint take_change(
        self, int i, char *x, const char *snapshot, char *returned, Py_ssize_t count
    ) noexcept nogil:
        return self.kernels[i].take_change(x, snapshot, returned, count)

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


# The default factory of spaces; a test replaces it.
make = HostSpace
