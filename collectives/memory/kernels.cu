/* The passes over vectors on a device: those of kernels.h, of which they give the bits.

   A thread computes some of the elements, and needs no other thread: there is no barrier, and no
   memory that threads share. So the same source is compiled by the host's compiler too, for tests, and
   run one thread after the other. Flags and shares are in pinned host memory. */

#include "numbers.h"

#define EACH(i, n)                                                                                \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;                    \
         i += (long long)gridDim.x * blockDim.x)

/* combine: out = share_a · a + share_b · b.
   mean: out = Σ share_j · vector_j, in the order of j, less those with share 0; out may be one. `own`
   is vector `me`, and the others follow in `parts`, from me + 1 on, so many elements apart.
   add_change: out = snapshot + (x − returned).
   all_finite, finite_change: *finite becomes 0 unless x, or what add_change gives, is. */
#define KERNELS(type, real)                                                                       \
                                                                                                  \
extern "C" __global__ void combine_##type(type *out, const type *a, double share_a,               \
                                          const type *b, double share_b, long long n)             \
{                                                                                                 \
    real s = (real)share_a, t = (real)share_b;                                                    \
    EACH(i, n)                                                                                    \
        out[i] = store_##type(s * load_##type(a[i]) + t * load_##type(b[i]));                     \
}                                                                                                 \
                                                                                                  \
extern "C" __global__ void mean_##type(type *out, const type *own, const type *parts,             \
                                       long long apart, int me, const double *shares, int count,  \
                                       long long n)                                               \
{                                                                                                 \
    EACH(i, n) {                                                                                  \
        real sum = 0;                                                                             \
        int used = 0;                                                                             \
        for (int j = 0; j < count; j++) {                                                         \
            const type *p = j == me ? own : parts + (j - me - 1 + count) % count * apart;         \
            if (shares[j] == 0)                                                                   \
                continue;                                                                         \
            real term = (real)shares[j] * load_##type(p[i]);                                      \
            sum = used++ ? sum + term : term;                                                     \
        }                                                                                         \
        out[i] = store_##type(sum);                                                               \
    }                                                                                             \
}                                                                                                 \
                                                                                                  \
extern "C" __global__ void add_change_##type(type *out, const type *snapshot, const type *x,      \
                                             const type *returned, long long n)                   \
{                                                                                                 \
    EACH(i, n)                                                                                    \
        out[i] = store_##type(load_##type(snapshot[i])                                            \
                              + (load_##type(x[i]) - load_##type(returned[i])));                  \
}                                                                                                 \
                                                                                                  \
extern "C" __global__ void all_finite_##type(int *finite, const type *x, long long n)             \
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
extern "C" __global__ void finite_change_##type(int *finite, const type *snapshot, const type *x, \
                                                const type *returned, long long n)                \
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
extern "C" __global__ void encode_##type##_##wire(wire *out, const type *x,                       \
                                                  const type *reference, long long n)             \
{                                                                                                 \
    EACH(i, n)                                                                                    \
        out[i] = saturate_##wire((float)(load_##type(x[i]) - load_##type(reference[i])));         \
}                                                                                                 \
                                                                                                  \
extern "C" __global__ void decode_##type##_##wire(type *out, const wire *travelled,               \
                                                  const type *reference, long long n)             \
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
