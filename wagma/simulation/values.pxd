from collectives.memory.layout cimport Layout
from collectives.memory.space cimport Space

cdef class Average:
    cdef Layout layout, wire
    cdef Space codec
    cdef bint compressed
    # The mean of the last average, a vector of `wire`; its weight; memory for parts of vectors.
    cdef char *mean
    cdef double weight
    cdef char **arrays
    cdef char *parts
    cdef Py_ssize_t part_size
    cdef const char **vectors
    cdef double *shares
    cdef double *weights
    cdef char **references
    # Of the average that is prepared: its members, and each one's arrays.
    cdef int size, most
    # How many of the arrays, from the first on, are averaged.
    cdef int averaged
    # The sum of its members' counts: see `collectives.protocols.job_count`.
    cdef double count
    cdef char ***sources

    cdef void begin(self) noexcept nogil
    cdef void add(self, char **arrays, double weight, char *reference) noexcept nogil
    cdef double compute(self, bint sliced) noexcept nogil
    cdef Py_ssize_t _end(self) noexcept nogil
    cdef void _slice(self) noexcept nogil
    cdef void _slice_part(self, int i, Py_ssize_t first, Py_ssize_t count) noexcept nogil
    cdef void _double(self) noexcept nogil
    cdef void _double_part(
        self, int i, Py_ssize_t first, Py_ssize_t count, double *weights) noexcept nogil
    cdef void _pair(
        self, int i, int one, int other, Py_ssize_t count, double *weights) noexcept nogil
    cdef void write(
        self, char **target, char **copy, char **saved, char **own, char *reference
    ) noexcept nogil
    cdef void _write_array(self, int i, char *target, char *reference) noexcept nogil
