/* Words that several processes change. */

#include <stdbool.h>

static inline unsigned long long atomic_load(const unsigned long long *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline bool atomic_swap(unsigned long long *word, unsigned long long old,
                               unsigned long long next)
{
    return __atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}
