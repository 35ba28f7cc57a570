"""The passes over vectors: see kernels.h."""

cdef extern from "kernels.h" nogil:
    ctypedef struct Kernels:
        int itemsize
        void (*combine)(
            void *, const void *, double, const void *, double, Py_ssize_t) noexcept nogil
        void (*mean)(
            char *const *, int, const char *const *, const double *, int, Py_ssize_t
        ) noexcept nogil
        void (*add_change)(
            void *, const void *, const void *, const void *, Py_ssize_t) noexcept nogil
        bint (*all_finite)(const void *, Py_ssize_t) noexcept nogil
        bint (*finite_change)(const void *, const void *, const void *, Py_ssize_t) noexcept nogil
        bint (*take_change)(void *, const void *, void *, Py_ssize_t) noexcept nogil

    ctypedef struct Codec:
        void (*encode)(void *, const void *, const void *, Py_ssize_t) noexcept nogil
        void (*decode)(void *, const void *, const void *, Py_ssize_t) noexcept nogil

    void choose_kernels(Kernels *, char)
    bint choose_codec(Codec *, char, char)
    void copy_away(void *, const void *, size_t)
