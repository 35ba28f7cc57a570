from collectives.memory.allocation cimport Memory
from collectives.memory.kernels cimport Codec, Kernels

cdef class Space:
    # Whether passes may complete after the functions that begin them return.
    cdef readonly bint deferred
    # On a device: bytes of the longest block in which vectors are averaged; else 0.
    cdef readonly Py_ssize_t block
    # The objects that own the memory of flags.
    cdef list flags

    cdef Memory allocate(self, Py_ssize_t size)
    cdef Memory export(self, Py_ssize_t size)
    cdef handle_of(self, Memory memory)
    cdef Memory map(self, handle)
    cdef int *new_flag(self) except NULL
    cdef int error(self) noexcept nogil
    cdef void attach(self) noexcept nogil
    cdef long long begun(self) noexcept nogil
    cdef bint over(self, long long ticket) noexcept nogil
    cdef void copy(self, char *to, const char *source, Py_ssize_t size) noexcept nogil
    cdef void copy_away(self, char *to, const char *source, Py_ssize_t size) noexcept nogil
    cdef void zero(self, char *to, Py_ssize_t size) noexcept nogil
    cdef void combine(
        self, int i, char *to, const char *a, double share_a, const char *b, double share_b,
        Py_ssize_t count) noexcept nogil
    cdef void mean(
        self, int i, char **to, int takers, const char **vectors, const double *shares, int size,
        Py_ssize_t count) noexcept nogil
    cdef void add_change(
        self, int i, char *to, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count) noexcept nogil
    cdef bint all_finite(self, int i, const char *x, Py_ssize_t count) noexcept nogil
    cdef bint finite_change(
        self, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count) noexcept nogil
    cdef bint take_change(
        self, int i, char *x, const char *snapshot, char *returned, Py_ssize_t count
    ) noexcept nogil
    cdef void begin_all_finite(
        self, int *flag, int i, const char *x, Py_ssize_t count) noexcept nogil
    cdef void begin_finite_change(
        self, int *flag, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count) noexcept nogil
    cdef void encode(
        self, int i, char *to, const char *source, const char *reference,
        Py_ssize_t count) noexcept nogil
    cdef void decode(
        self, int i, char *to, const char *source, const char *reference,
        Py_ssize_t count) noexcept nogil

cdef class HostSpace(Space):
    cdef Kernels *kernels
    cdef Codec *codecs
