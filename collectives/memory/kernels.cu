/* The passes over vectors on a device: those of kernels.h, with bitwise equal results.

   Each thread computes some elements independently: there is no barrier and no shared memory.
   So the same source can be compiled by the host's C compiler for tests, and run one thread after
   the other. Flags are in pinned host memory. */

#include "members.h"
#include "numbers.h"

#ifdef __CUDACC_RTC__
#define KERNEL extern "C" __global__ void
#define ARGUMENT const __grid_constant__ /* which is not copied to be indexed */
#else
#define KERNEL void
#define ARGUMENT const
#endif

#define EACH(i, n)                                                                                \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;                   \
         i += (long long)gridDim.x * blockDim.x)

/* combine: out = share_a · a + share_b · b.
   mean: out = Σ share_j · vector_j, in the order of j; out may be one.
   add_change: out = snapshot + (x − returned).
   all_finite, finite_change: *finite becomes 0 unless x, or the result of add_change, is finite.
   all_bounded: *bounded becomes 0 unless all of x is so small that a finite number stays finite
   when x is subtracted and added again: below half the spacing of the largest numbers. */
#define KERNELS(type, real)                                                                       \
                                                                                                  \
KERNEL combine_##type(type *out, const type *a, double share_a, const type *b, double share_b,    \
                      long long n)                                                                \
{                                                                                                 \
    real s = (real)share_a, t = (real)share_b;                                                    \
    EACH(i, n)                                                                                    \
        out[i] = store_##type(s * load_##type(a[i]) + t * load_##type(b[i]));                     \
}                                                                                                 \
                                                                                                  \
KERNEL mean_##type(type *out, ARGUMENT Members members, long long n)                              \
{                                                                                                 \
    EACH(i, n) {                                                                                  \
        real sum = 0;                                                                             \
        for (int j = 0; j < members.count; j++) {                                                 \
            const type *p = (const type *)members.vectors[j];                                     \
            real term = (real)members.shares[j] * load_##type(p[i]);                              \
            sum = j ? sum + term : term;                                                          \
        }                                                                                         \
        out[i] = store_##type(sum);                                                               \
    }                                                                                             \
}                                                                                                 \
                                                                                                  \
KERNEL add_change_##type(type *out, const type *snapshot, const type *x, const type *returned,    \
                         long long n)                                                             \
{                                                                                                 \
    EACH(i, n)                                                                                    \
        out[i] = store_##type(load_##type(snapshot[i])                                            \
                              + (load_##type(x[i]) - load_##type(returned[i])));                  \
}                                                                                                 \
                                                                                                  \
KERNEL all_finite_##type(int *finite, const type *x, long long n)                                 \
{                                                                                                 \
    int bad = 0;                                                                                  \
    EACH(i, n) {                                                                                  \
        real value = load_##type(x[i]);                                                           \
        bad |= value - value != 0;                                                                \
    }                                                                                             \
    if (bad)                                                                                      \
        *finite = 0;                                                                              \
}                                                                                                 \
                                                                                                  \
KERNEL all_bounded_##type(int *bounded, const type *x, long long n)                               \
{                                                                                                 \
    int bad = 0;                                                                                  \
    EACH(i, n) {                                                                                  \
        real value = load_##type(x[i]);                                                           \
        bad |= !(value < (real)0x1p64 && value > (real)-0x1p64);                                  \
    }                                                                                             \
    if (bad)                                                                                      \
        *bounded = 0;                                                                             \
}                                                                                                 \
                                                                                                  \
KERNEL finite_change_##type(int *finite, const type *snapshot, const type *x,                     \
                            const type *returned, long long n)                                    \
{                                                                                                 \
    int bad = 0;                                                                                  \
    EACH(i, n) {                                                                                  \
        type changed = store_##type(load_##type(snapshot[i])                                      \
                                    + (load_##type(x[i]) - load_##type(returned[i])));            \
        real value = load_##type(changed);                                                        \
        bad |= value - value != 0;                                                                \
    }                                                                                             \
    if (bad)                                                                                      \
        *finite = 0;                                                                              \
}

/* encode: wire = x − reference; decode: x = reference + wire. */
#define CODEC(type, wire)                                                                         \
                                                                                                  \
KERNEL encode_##type##_##wire(wire *out, const type *x, const type *reference, long long n)       \
{                                                                                                 \
    EACH(i, n)                                                                                    \
        out[i] = saturate_##wire((float)(load_##type(x[i]) - load_##type(reference[i])));         \
}                                                                                                 \
                                                                                                  \
KERNEL decode_##type##_##wire(type *out, const wire *travelled, const type *reference,            \
                              long long n)                                                        \
{                                                                                                 \
    EACH(i, n)                                                                                    \
        out[i] = store_##type(load_##type(reference[i]) + load_##wire(travelled[i]));             \
}

KERNELS(float32, float)
KERNELS(float64, double)
KERNELS(float16, float)
KERNELS(bfloat16, float)
CODEC(float32, float16)
CODEC(float32, bfloat16)
CODEC(float64, float16)
CODEC(float64, bfloat16)
