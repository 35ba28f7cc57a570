/* The passes over vectors, once for each dtype. Plain loops that the compiler vectorizes; where it
   can, it compiles a version for each generation of x86, and the loader chooses one. kernels.cu has
   the same passes for devices. */

#include <stddef.h>
#include "numbers.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define KERNEL __attribute__((target_clones("avx512f", "avx2", "default"), unused)) static
#else
#define KERNEL __attribute__((unused)) static
#endif

typedef struct {
    int itemsize;
    void (*combine)(void *, const void *, double, const void *, double, ptrdiff_t);
    void (*mean)(char *const *, int, const char *const *, const double *, int, ptrdiff_t);
    void (*add_change)(void *, const void *, const void *, const void *, ptrdiff_t);
    int (*all_finite)(const void *, ptrdiff_t);
    int (*finite_change)(const void *, const void *, const void *, ptrdiff_t);
    int (*take_change)(void *, const void *, void *, ptrdiff_t);
} Kernels;

/* Converts between a dtype and the one sent in its place. */
typedef struct {
    void (*encode)(void *, const void *, const void *, ptrdiff_t);
    void (*decode)(void *, const void *, const void *, ptrdiff_t);
} Codec;

/* Bytes of each vector averaged at a time: their sums stay in the first-level cache. */
#define PIECE 2048

/* Fetch a piece of a vector, from this byte on, that is written soon, for writing. What another core
   has read last is shared with it: after a mere read each write would wait for that core, one line
   after the other, which takes up to four times as long (measured on Sapphire Rapids). Processors
   without the instruction ignore it. */
INLINE void fetch_to_write(const char *vector, ptrdiff_t begin, ptrdiff_t end)
{
    end = end - begin < PIECE ? end : begin + PIECE;
    for (ptrdiff_t i = begin; i < end; i += 64)
#if defined(__x86_64__) && defined(__GNUC__)
        __asm__ volatile("prefetchw %0" ::"m"(vector[i]));
#elif defined(__GNUC__)
        __builtin_prefetch(vector + i, 1);
#else
        (void)vector;
#endif
}

/* A loop over m elements each of which is read before it is written: where a vector is both read and
   written, the compiler need not fear that they overlap otherwise. */
#define EACH _Pragma("GCC ivdep") for (ptrdiff_t i = 0; i < m; i++)

/* Write a value to one or two vectors in the same pass. */
#define WRITE(type, value)                                                                        \
    {                                                                                             \
        if (other)                                                                                \
            EACH o[i] = other[i] = store_##type(value);                                           \
        else                                                                                      \
            EACH o[i] = store_##type(value);                                                      \
    }

/* combine: out = share_a · a + share_b · b, the same for (a, b) as for (b, a).
   mean: out = Σ share_j · vector_j, in the order of j, skipping those with share 0, for each out of
   `outs`, of which each may be one of the vectors.
   add_change: out = snapshot + (x − returned).
   all_finite, finite_change: return whether x, or the result of add_change, is finite.
   take_change: x and returned = snapshot + (x − returned); return whether that is finite. */
#define KERNELS(type, real)                                                                       \
                                                                                                  \
KERNEL void combine_##type(void *out, const void *a, double share_a, const void *b,               \
                           double share_b, ptrdiff_t n)                                           \
{                                                                                                 \
    type *o = out;                                                                                \
    const type *p = a, *q = b;                                                                    \
    real s = (real)share_a, t = (real)share_b;                                                    \
    enum { piece = PIECE / sizeof(type) };                                                        \
    fetch_to_write(out, 0, n * sizeof(type));                                                     \
    for (ptrdiff_t begin = 0; begin < n; begin += piece) {                                        \
        ptrdiff_t m = n - begin < piece ? n - begin : piece;                                      \
        ptrdiff_t next = begin + m;                                                               \
        fetch_to_write(out, next * sizeof(type), n * sizeof(type));                               \
        for (ptrdiff_t i = begin; i < next; i++)                                                  \
            o[i] = store_##type(s * load_##type(p[i]) + t * load_##type(q[i]));                   \
    }                                                                                             \
}                                                                                                 \
                                                                                                  \
KERNEL void mean_##type(char *const *outs, int takers, const char *const *vectors,                \
                        const double *shares, int count, ptrdiff_t n)                             \
{                                                                                                 \
    enum { piece = PIECE / sizeof(type) };                                                        \
    real sums[piece], s = 0;                                                                      \
    int contributors = 0;                                                                         \
    for (int j = 0; j < count; j++)                                                               \
        contributors += shares[j] != 0;                                                           \
    for (int k = 0; k < takers; k++)                                                              \
        fetch_to_write(outs[k], 0, n * sizeof(type));                                             \
    for (ptrdiff_t begin = 0; begin < n; begin += piece) {                                        \
        ptrdiff_t m = n - begin < piece ? n - begin : piece;                                      \
        ptrdiff_t next = begin + m;                                                               \
        for (int k = 0; k < takers; k++)                                                          \
            fetch_to_write(outs[k], next * sizeof(type), n * sizeof(type));                       \
        type *o = (type *)outs[0] + begin;                                                        \
        type *other = takers > 1 ? (type *)outs[1] + begin : NULL;                                \
        const type *p = NULL;                                                                     \
        int added = 0;                                                                            \
        for (int j = 0; j < count; j++) {                                                         \
            const type *q = (const type *)vectors[j] + begin;                                     \
            real t = (real)shares[j];                                                             \
            if (shares[j] == 0)                                                                   \
                continue;                                                                         \
            added++;                                                                              \
            if (contributors == 1)                                                                \
                WRITE(type, t * load_##type(q[i]))                                                \
            else if (added == 1)                                                                  \
                p = q, s = t;                                                                     \
            else if (contributors == 2)                                                           \
                WRITE(type, s * load_##type(p[i]) + t * load_##type(q[i]))                        \
            else if (added == 2)                                                                  \
                EACH sums[i] = s * load_##type(p[i]) + t * load_##type(q[i]);                     \
            else if (added < contributors)                                                        \
                EACH sums[i] += t * load_##type(q[i]);                                            \
            else                                                                                  \
                WRITE(type, sums[i] + t * load_##type(q[i]))                                      \
        }                                                                                         \
        if (contributors == 0)                                                                    \
            WRITE(type, 0)                                                                        \
        for (int k = 2; k < takers; k++)                                                          \
            memcpy((type *)outs[k] + begin, o, m * sizeof(type));                                 \
    }                                                                                             \
}                                                                                                 \
                                                                                                  \
KERNEL void add_change_##type(void *out, const void *snapshot, const void *x,                     \
                              const void *returned, ptrdiff_t n)                                  \
{                                                                                                 \
    type *o = out;                                                                                \
    const type *s = snapshot, *p = x, *q = returned;                                              \
    for (ptrdiff_t i = 0; i < n; i++)                                                             \
        o[i] = store_##type(load_##type(s[i]) + (load_##type(p[i]) - load_##type(q[i])));         \
}                                                                                                 \
                                                                                                  \
KERNEL int all_finite_##type(const void *x, ptrdiff_t n)                                          \
{                                                                                                 \
    const type *p = x;                                                                            \
    int bad = 0;                                                                                  \
    for (ptrdiff_t i = 0; i < n; i++)                                                             \
        bad |= is_not_finite_##type(p[i]);                                                        \
    return !bad;                                                                                  \
}                                                                                                 \
                                                                                                  \
KERNEL int finite_change_##type(const void *snapshot, const void *x, const void *returned,        \
                                ptrdiff_t n)                                                      \
{                                                                                                 \
    const type *s = snapshot, *p = x, *q = returned;                                              \
    int bad = 0;                                                                                  \
    for (ptrdiff_t i = 0; i < n; i++) {                                                           \
        type changed = store_##type(load_##type(s[i]) + (load_##type(p[i]) - load_##type(q[i]))); \
        bad |= is_not_finite_##type(changed);                                                     \
    }                                                                                             \
    return !bad;                                                                                  \
}                                                                                                 \
                                                                                                  \
KERNEL int take_change_##type(void *x, const void *snapshot, void *returned, ptrdiff_t m)         \
{                                                                                                 \
    const type *s = snapshot;                                                                     \
    type *p = x, *q = returned;                                                                   \
    int bad = 0;                                                                                  \
    EACH {                                                                                        \
        type changed = store_##type(load_##type(s[i]) + (load_##type(p[i]) - load_##type(q[i]))); \
        p[i] = q[i] = changed;                                                                    \
        bad |= is_not_finite_##type(changed);                                                     \
    }                                                                                             \
    return !bad;                                                                                  \
}

/* encode: wire = x − reference; decode: x = reference + wire. */
#define CODEC(type, real, wire)                                                                   \
                                                                                                  \
KERNEL void encode_##type##_##wire(void *out, const void *x, const void *reference, ptrdiff_t n)  \
{                                                                                                 \
    wire *o = out;                                                                                \
    const type *p = x, *r = reference;                                                            \
    for (ptrdiff_t i = 0; i < n; i++)                                                             \
        o[i] = saturate_##wire((float)(load_##type(p[i]) - load_##type(r[i])));                   \
}                                                                                                 \
                                                                                                  \
KERNEL void decode_##type##_##wire(void *out, const void *travelled, const void *reference,       \
                                   ptrdiff_t n)                                                   \
{                                                                                                 \
    type *o = out;                                                                                \
    const wire *p = travelled;                                                                    \
    const type *r = reference;                                                                    \
    for (ptrdiff_t i = 0; i < n; i++)                                                             \
        o[i] = store_##type(load_##type(r[i]) + load_##wire(p[i]));                               \
}

KERNELS(float32, float)
KERNELS(float64, double)
KERNELS(float16, float)
KERNELS(bfloat16, float)
CODEC(float32, float, float16)
CODEC(float32, float, bfloat16)
CODEC(float64, double, float16)
CODEC(float64, double, bfloat16)

#define USE(type)                                                                                 \
    kernels->itemsize = sizeof(type);                                                             \
    kernels->combine = combine_##type;                                                            \
    kernels->mean = mean_##type;                                                                  \
    kernels->add_change = add_change_##type;                                                      \
    kernels->all_finite = all_finite_##type;                                                      \
    kernels->finite_change = finite_change_##type;                                                  \
    kernels->take_change = take_change_##type

/* Fill in the kernels of a dtype: 'f', 'd', 'e' as in Python's struct module, 'E' for bfloat16. */
__attribute__((unused)) static void choose_kernels(Kernels *kernels, char dtype)
{
    switch (dtype) {
    case 'f': USE(float32); break;
    case 'd': USE(float64); break;
    case 'e': USE(float16); break;
    case 'E': USE(bfloat16); break;
    }
}

/* Copy data that is not read again soon, past the cache, which keeps other data. */
__attribute__((unused)) static void copy_away(void *to, const void *from, size_t size)
{
#if defined(__SSE2__)
    size_t ahead = -(size_t)to % 16 < size ? -(size_t)to % 16 : size;
    char *t = to;
    const char *f = from;
    memcpy(t, f, ahead);
    for (t += ahead, f += ahead, size -= ahead; size >= 16; t += 16, f += 16, size -= 16)
        _mm_stream_si128((__m128i *)t, _mm_loadu_si128((const __m128i *)f));
    memcpy(t, f, size);
    _mm_sfence();
#else
    memcpy(to, from, size);
#endif
}

#define USE_CODEC(type, wire)                                                                     \
    codec->encode = encode_##type##_##wire;                                                       \
    codec->decode = decode_##type##_##wire

/* Fill in the codec of a dtype and the one sent in its place; return whether there is one: fp16 and
   bf16 are sent unchanged. */
__attribute__((unused)) static int choose_codec(Codec *codec, char dtype, char wire)
{
    if (dtype == 'f' && wire == 'e') { USE_CODEC(float32, float16); return 1; }
    if (dtype == 'f' && wire == 'E') { USE_CODEC(float32, bfloat16); return 1; }
    if (dtype == 'd' && wire == 'e') { USE_CODEC(float64, float16); return 1; }
    if (dtype == 'd' && wire == 'E') { USE_CODEC(float64, bfloat16); return 1; }
    return 0;
}
