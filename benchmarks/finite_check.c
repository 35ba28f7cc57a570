/* The passes that finite_check.py measures, by the engine's kernels. */

#include <string.h>
#include "kernels.h"

/* As in exchange/shared: elements of a block that one member averages, and of a part of it that is
   saved and averaged while it is in the first-level cache. */
enum { BLOCK = 32768, PART = 1024 };

int check(const char *x, ptrdiff_t n)
{
    return all_finite_float32(x, n);
}

void copy(char *to, const char *x, ptrdiff_t n)
{
    memcpy(to, x, n * sizeof(float));
}

static void mean_of(char *const *vectors, const double *shares, int size, ptrdiff_t first,
                    ptrdiff_t n)
{
    char *parts[size];
    for (int k = 0; k < size; k++)
        parts[k] = vectors[k] + first * sizeof(float);
    mean_float32(parts, size, (const char *const *)parts, shares, size, n);
}

/* Write the mean of these elements to all vectors. */
void average(char *const *vectors, const double *shares, int size, ptrdiff_t first, ptrdiff_t n)
{
    for (ptrdiff_t end = first + n; first < end; first += BLOCK)
        mean_of(vectors, shares, size, first, end - first < BLOCK ? end - first : BLOCK);
}

/* The same, and save what was there; return whether the mean is finite. */
int average_and_save(char *const *vectors, char *const *saved, const double *shares, int size,
                     ptrdiff_t first, ptrdiff_t n)
{
    int finite = 1;
    for (ptrdiff_t end = first + n; first < end; first += PART) {
        const ptrdiff_t count = end - first < PART ? end - first : PART;
        const ptrdiff_t offset = first * sizeof(float);
        for (int k = 0; k < size; k++)
            memcpy(saved[k] + offset, vectors[k] + offset, count * sizeof(float));
        mean_of(vectors, shares, size, first, count);
        finite &= all_finite_float32(vectors[0] + offset, count);
    }
    return finite;
}
