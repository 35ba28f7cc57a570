"""The layout of a vector: one or several arrays, the application's or in the engine's memory.

In the engine's memory a vector is contiguous: a header, then the arrays, each at a multiple of 64
bytes. In either memory a vector is given by the addresses of its arrays.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdlib cimport free

from collectives.memory.allocation cimport LINE, round_up, zeroed

from collectives.device_arrays import SIZES
from collectives.memory import space

# Dtypes that a narrower one may be sent in place of.
WIDE = ("float32", "float64")

# The struct module's codes for the dtypes. Numpy's bfloat16 is that of ml_dtypes, whose arrays
# export a buffer as integers only.
FORMATS = {"float16": b"e", "bfloat16": b"H", "float32": b"f", "float64": b"d"}


cdef class Layout:
    """The dtypes and lengths of a vector's arrays, and the passes over such vectors.

    Args:
        dtypes: the names of the arrays' dtypes.
        lengths: the arrays' numbers of elements.
        single: whether users pass one array rather than a list.
        make_space: function that makes the vectors' `Space` from the arrays' dtypes, and those sent
            in their place; by default the host's memory.
        by_value: indices of arrays of which x itself takes the place of snapshot + (x − returned).
    """

    def __init__(self, dtypes, lengths, bint single, make_space=None, by_value=()):
        cdef int i
        cdef Py_ssize_t place = HEADER
        self.count = len(dtypes)
        self.single = single
        self.dtypes = tuple(dtypes)
        self.lengths = tuple(lengths)
        self.make_space = make_space or space.make
        self.space = self.make_space(self.dtypes, self.dtypes)
        self.begin = <Py_ssize_t *>zeroed(4 * self.count, sizeof(Py_ssize_t))
        self.format = <char *>zeroed(2 * self.count, sizeof(char))
        if self.begin == NULL or self.format == NULL:
            raise MemoryError
        self.by_value = self.format + self.count
        self.length = self.begin + self.count
        self.bytes = self.length + self.count
        self.itemsize = self.bytes + self.count
        for i in range(self.count):
            self.itemsize[i] = SIZES[self.dtypes[i]]
            self.format[i] = ord(FORMATS[self.dtypes[i]])
            self.begin[i] = place
            self.length[i] = self.lengths[i]
            self.bytes[i] = self.length[i] * self.itemsize[i]
            self.by_value[i] = i in by_value
            place = round_up(place + self.bytes[i], LINE)
        self.size = place

    def __dealloc__(self):
        free(self.begin)
        free(self.format)

    def sent_as(self, wire_dtype):
        """Return the dtypes in which arrays are sent, if wide ones are sent in this one.

        Those by value are sent in their own: rounded differences could leave the range of values.
        """
        return tuple(
            wire_dtype if wire_dtype and dtype in WIDE and not self.by_value[i] else dtype
            for i, dtype in enumerate(self.dtypes))

    cdef Py_ssize_t part(
        self, int i, Py_ssize_t low, Py_ssize_t high, Py_ssize_t *first
    ) noexcept nogil:
        """Return how many elements of array i are in these bytes of a vector; set the first."""
        cdef Py_ssize_t begin = max(self.begin[i], low)
        cdef Py_ssize_t end = min(self.begin[i] + self.bytes[i], high)
        first[0] = (begin - self.begin[i]) // self.itemsize[i]
        return max(0, end - begin) // self.itemsize[i]

    cdef void locate(self, char **arrays, char *vector) noexcept nogil:
        """Set the addresses of the arrays of a vector in the engine's memory."""
        cdef int i
        for i in range(self.count):
            arrays[i] = vector + self.begin[i]

    cdef void copy(self, char **to, char **source) noexcept nogil:
        cdef int i
        for i in range(self.count):
            self.space.copy(to[i], source[i], self.bytes[i])

    cdef void zero(self, char **arrays) noexcept nogil:
        cdef int i
        for i in range(self.count):
            self.space.zero(arrays[i], self.bytes[i])

    cdef void zero_vector(self, char *vector) noexcept nogil:
        self.space.zero(vector, self.size)

    cdef void combine(self, char **x, double share_x, char **m, double share_m) noexcept nogil:
        """x = share_x · x + share_m · m"""
        cdef int i
        for i in range(self.count):
            self.space.combine(i, x[i], x[i], share_x, m[i], share_m, self.length[i])

    cdef void add_change(
        self, char **to, char **snapshot, char **x, char **returned
    ) noexcept nogil:
        """to = snapshot + (x − returned), or x by value"""
        cdef int i
        for i in range(self.count):
            if not self.by_value[i]:
                self.space.add_change(i, to[i], snapshot[i], x[i], returned[i], self.length[i])
            elif to[i] != x[i]:
                self.space.copy(to[i], x[i], self.bytes[i])

    cdef bint all_finite(self, char **x) noexcept nogil:
        cdef int i
        for i in range(self.count):
            if not self.space.all_finite(i, x[i], self.length[i]):
                return False
        return True

    cdef bint finite_change(self, char **snapshot, char **x, char **returned) noexcept nogil:
        """Return whether all elements of snapshot + (x − returned), or x by value, are finite."""
        cdef int i
        for i in range(self.count):
            if self.by_value[i]:
                if not self.space.all_finite(i, x[i], self.length[i]):
                    return False
            elif not self.space.finite_change(i, snapshot[i], x[i], returned[i], self.length[i]):
                return False
        return True

    cdef void begin_finite_change(
        self, int *flag, char **snapshot, char **x, char **returned
    ) noexcept nogil:
        """Set flag, which is 1, to 0 unless that is finite; valid when a ticket is over."""
        cdef int i
        for i in range(self.count):
            if self.by_value[i]:
                self.space.begin_all_finite(flag, i, x[i], self.length[i])
            else:
                self.space.begin_finite_change(
                    flag, i, snapshot[i], x[i], returned[i], self.length[i])

    cdef bint take_change(self, char **x, char **snapshot, char **returned) noexcept nogil:
        """x and returned = snapshot + (x − returned), or x by value; return whether that is finite.

        If it is not, both hold anything.
        """
        cdef int i
        for i in range(self.count):
            if self.by_value[i]:
                if not self.space.all_finite(i, x[i], self.length[i]):
                    return False
                self.space.copy(returned[i], x[i], self.bytes[i])
            elif not self.space.take_change(
                    i, x[i], snapshot[i], returned[i], self.length[i]):
                return False
        return True


cdef class DeviceVector:
    """A checked vector on a device: the addresses of its arrays, which the caller keeps alive."""

    def __init__(self, list addresses):
        self.addresses = addresses


cdef class UserVector:
    """A user's vector, checked; its buffers are held as long as this object lives.

    Raises:
        TypeError, ValueError: it does not fit the layout, or is read-only although `flags` request
            write access.
    """

    def __init__(self, vector, Layout layout, int flags):
        cdef int i
        cdef bint in_order = True
        if isinstance(vector, DeviceVector):
            self._point_to(vector, layout)
            return
        if layout.single:
            arrays = (vector,)
        elif isinstance(vector, (list, tuple)) and len(vector) == layout.count:
            arrays = vector
        else:
            raise _not_such_a_list(vector, layout)
        self.views = <Py_buffer *>zeroed(layout.count, sizeof(Py_buffer) + sizeof(char *))
        if self.views == NULL:
            raise MemoryError
        self.arrays = <char **>(self.views + layout.count)
        for i in range(layout.count):
            array = arrays[i]
            try:
                if layout.format[i] == c"H":
                    # An array of 16-bit integers would have the same buffer format.
                    array = array.view("uint16") if array.dtype.name == "bfloat16" else None
                PyObject_GetBuffer(
                    array, &self.views[i], flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
            except (AttributeError, BufferError, ValueError, TypeError):
                raise _what_is_wrong(arrays[i], layout, i) from None
            self.count = i + 1
            self.arrays[i] = <char *>self.views[i].buf
            if (self.views[i].ndim != 1 or self.views[i].shape[0] != layout.length[i]
                    or self.views[i].format[0] != layout.format[i]
                    or self.views[i].format[1] != 0
                    or <size_t>self.arrays[i] % layout.itemsize[i] != 0):
                raise _what_is_wrong(arrays[i], layout, i)
            if i > 0 and self.arrays[i] < self.arrays[i - 1] + self.views[i - 1].len:
                in_order = False
        if not in_order:
            _check_apart(arrays)

    cdef _point_to(self, DeviceVector vector, Layout layout):
        cdef int i
        cdef size_t address
        self.arrays = self.addresses = <char **>zeroed(layout.count, sizeof(char *))
        if self.addresses == NULL:
            raise MemoryError
        for i in range(layout.count):
            address = vector.addresses[i]
            self.arrays[i] = <char *>address

    def __dealloc__(self):
        cdef int i
        free(self.addresses)
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])
        free(self.views)


cdef class NotCopied:
    """A context manager of a vector that needs no copy, entered sooner than `nullcontext`."""

    cdef object vector

    def __init__(self, vector):
        self.vector = vector

    def __enter__(self):
        return self.vector

    def __exit__(self, *error):
        return None


def _check_apart(arrays):
    """Raise ValueError if two of the arrays share memory."""
    import numpy

    from collectives.settings import sharing_error

    error = sharing_error([numpy.asarray(array) for array in arrays], "array {} of the vector")
    if error is not None:
        raise error


def _not_such_a_list(vector, Layout layout):
    """Return the error for a vector that is not a list with the layout's number of arrays."""
    if isinstance(vector, (list, tuple)):
        return ValueError(
            f"the vector has {len(vector)} arrays, the collective's have {layout.count}"
        )
    return TypeError(
        f"the vector is a {type(vector).__name__}, not a list of {layout.count} arrays"
    )


def _what_is_wrong(array, Layout layout, int i):
    """Return the error for an array that the collective cannot average."""
    from collectives.settings import array_error

    name = "the vector" if layout.single else f"array {i} of the vector"
    return array_error(name, array, layout.dtypes[i], layout.lengths[i])
