/* The passes over vectors, once for float and once for double. Plain loops that the compiler
   vectorises; where it can, it makes a version for each generation of x86 and the loader chooses. */

#include <stddef.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define KERNEL __attribute__((target_clones("avx512f", "avx2", "default"), unused)) static
#else
#define KERNEL __attribute__((unused)) static
#endif

#define KERNELS(real)                                                                             \
                                                                                                  \
KERNEL void add_##real(real *out, const real *a, const real *b, ptrdiff_t n)                      \
{                                                                                                 \
    for (ptrdiff_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                       \
}                                                                                                 \
                                                                                                  \
KERNEL void mean_of_sum_##real(real *out, const real *a, const real *b, real weight, ptrdiff_t n) \
{                                                                                                 \
    for (ptrdiff_t i = 0; i < n; i++) out[i] = (a[i] + b[i]) / weight;                            \
}                                                                                                 \
                                                                                                  \
KERNEL void mean_##real(real *out, const real *total, real weight, ptrdiff_t n)                   \
{                                                                                                 \
    for (ptrdiff_t i = 0; i < n; i++) out[i] = total[i] / weight;                                 \
}                                                                                                 \
                                                                                                  \
/* x = (weight · m + x) / (weight + 1), the paper's rule for a late rank */                       \
KERNEL void blend_##real(real *x, const real *m, real weight, ptrdiff_t n)                        \
{                                                                                                 \
    for (ptrdiff_t i = 0; i < n; i++) x[i] = (weight * m[i] + x[i]) / (weight + 1);               \
}                                                                                                 \
                                                                                                  \
KERNEL void add_change_##real(                                                                    \
    real *out, const real *snapshot, const real *x, const real *returned, ptrdiff_t n)            \
{                                                                                                 \
    for (ptrdiff_t i = 0; i < n; i++) out[i] = snapshot[i] + (x[i] - returned[i]);                \
}                                                                                                 \
                                                                                                  \
/* x - x is 0 unless x is infinite or NaN; a reduction of integers vectorises, of floats not */   \
KERNEL int all_finite_##real(const real *x, ptrdiff_t n)                                          \
{                                                                                                 \
    int bad = 0;                                                                                  \
    for (ptrdiff_t i = 0; i < n; i++) bad |= x[i] - x[i] != 0;                                    \
    return !bad;                                                                                  \
}                                                                                                 \
                                                                                                  \
KERNEL int finite_change_##real(const real *x, const real *returned, ptrdiff_t n)                 \
{                                                                                                 \
    int bad = 0;                                                                                  \
    for (ptrdiff_t i = 0; i < n; i++) {                                                           \
        real change = x[i] - returned[i];                                                         \
        bad |= change - change != 0;                                                              \
    }                                                                                             \
    return !bad;                                                                                  \
}

KERNELS(float)
KERNELS(double)
