/* The passes' operations on one number, in C, C++ and CUDA alike. Arithmetic on fp16 and bf16 is in
   single precision; they are converted by integer operations that need no special instructions. */

#ifndef NUMBERS_H
#define NUMBERS_H

#ifdef __CUDACC_RTC__ /* has no headers of the host */
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#define INLINE static __device__ __forceinline__
#else
#include <stdint.h>
#include <string.h>
#define INLINE static inline
#endif

typedef float float32;
typedef double float64;
typedef uint16_t float16;
typedef uint16_t bfloat16;

INLINE float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define load_float32(x) (x)
#define store_float32(x) (x)
#define load_float64(x) (x)
#define store_float64(x) (x)

/* Of a wide number, x − x is 0 unless it is infinite or NaN; of a narrow one, the exponent says it
   without a conversion. As integers they are reduced by vector instructions, as floats not. */
#define is_not_finite_float32(x) ((x) - (x) != 0)
#define is_not_finite_float64(x) ((x) - (x) != 0)
#define is_not_finite_float16(x) (((x) & 0x7c00) == 0x7c00)
#define is_not_finite_bfloat16(x) (((x) & 0x7f80) == 0x7f80)

INLINE float load_bfloat16(uint16_t half) { return as_float((uint32_t)half << 16); }

INLINE uint16_t store_bfloat16(float value)
{
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40;
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

/* The exponents' biases differ by 112; multiplying converts subnormal numbers correctly as well. */
INLINE float load_float16(uint16_t half)
{
    uint32_t bits = as_bits(as_float((uint32_t)(half & 0x7fff) << 13) * 0x1p112f);
    bits |= (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return as_float(bits | (uint32_t)(half & 0x8000) << 16);
}

/* Adding 0.5, whose last bit is worth the smallest fp16, rounds numbers that become subnormal. */
INLINE uint16_t store_float16(float value)
{
    uint32_t bits = as_bits(value), size = bits & 0x7fffffff;
    uint32_t subnormal = as_bits(as_float(size) + 0.5f) - 0x3f000000;
    uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t half = size < 0x38800000 ? subnormal : normal;
    uint32_t not_finite = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    half = size >= 0x47800000 ? not_finite : half;
    return half | (bits >> 16 & 0x8000);
}

/* A number too large for fp16 becomes the largest one, not infinite. */
INLINE uint16_t saturate_float16(float value)
{
    uint16_t half = store_float16(value);
    return half - ((half & 0x7fff) == 0x7c00);
}

INLINE uint16_t saturate_bfloat16(float value)
{
    uint16_t half = store_bfloat16(value);
    return half - ((half & 0x7fff) == 0x7f80);
}

#endif
