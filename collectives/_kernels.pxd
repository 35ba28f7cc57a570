"""The kernels of _kernels.h under one name for both dtypes."""

ctypedef fused real:
    float
    double

cdef extern from "_kernels.h" nogil:
    void add_float(float *, const float *, const float *, Py_ssize_t)
    void add_double(double *, const double *, const double *, Py_ssize_t)
    void mean_of_sum_float(float *, const float *, const float *, float, Py_ssize_t)
    void mean_of_sum_double(double *, const double *, const double *, double, Py_ssize_t)
    void mean_float(float *, const float *, float, Py_ssize_t)
    void mean_double(double *, const double *, double, Py_ssize_t)
    void blend_float(float *, const float *, float, Py_ssize_t)
    void blend_double(double *, const double *, double, Py_ssize_t)
    void add_change_float(float *, const float *, const float *, const float *, Py_ssize_t)
    void add_change_double(double *, const double *, const double *, const double *, Py_ssize_t)
    bint all_finite_float(const float *, Py_ssize_t)
    bint all_finite_double(const double *, Py_ssize_t)
    bint finite_change_float(const float *, const float *, Py_ssize_t)
    bint finite_change_double(const double *, const double *, Py_ssize_t)


cdef inline void add(real *out, const real *a, const real *b, Py_ssize_t n) noexcept nogil:
    if real is float:
        add_float(out, a, b, n)
    else:
        add_double(out, a, b, n)


cdef inline void mean_of_sum(
    real *out, const real *a, const real *b, real weight, Py_ssize_t n
) noexcept nogil:
    if real is float:
        mean_of_sum_float(out, a, b, weight, n)
    else:
        mean_of_sum_double(out, a, b, weight, n)


cdef inline void mean(real *out, const real *total, real weight, Py_ssize_t n) noexcept nogil:
    if real is float:
        mean_float(out, total, weight, n)
    else:
        mean_double(out, total, weight, n)


cdef inline void blend(real *x, const real *m, real weight, Py_ssize_t n) noexcept nogil:
    if real is float:
        blend_float(x, m, weight, n)
    else:
        blend_double(x, m, weight, n)


cdef inline void add_change(
    real *out, const real *snapshot, const real *x, const real *returned, Py_ssize_t n
) noexcept nogil:
    if real is float:
        add_change_float(out, snapshot, x, returned, n)
    else:
        add_change_double(out, snapshot, x, returned, n)


cdef inline bint all_finite(const real *x, Py_ssize_t n) noexcept nogil:
    if real is float:
        return all_finite_float(x, n)
    else:
        return all_finite_double(x, n)


cdef inline bint finite_change(
    const real *x, const real *returned, Py_ssize_t n
) noexcept nogil:
    if real is float:
        return finite_change_float(x, returned, n)
    else:
        return finite_change_double(x, returned, n)
