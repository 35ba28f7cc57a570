/* Words that several processes change, in one order for all: a rank that changes its word and then
   reads another's relies on it (`SharedExchangeProtocol.is_undisturbed`). */

#include <stdbool.h>

static inline unsigned long long atomic_load(const unsigned long long *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static inline bool atomic_swap(unsigned long long *word, unsigned long long old,
                               unsigned long long next)
{
    return __atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

static inline void atomic_store(unsigned long long *word, unsigned long long value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}
