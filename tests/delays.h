/* Random delays around whatever ranks and threads hand each other memory by: words, mutexes, copies
   and the looks at the clock around passes. `make test-delays` has the compiler include this before
   each source. A delay stands for a thread that the system interrupts there; other orders of memory
   accesses than the processor's own are not tried. */

#define _GNU_SOURCE 1
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { LOOK = 100000000 }; /* nanoseconds, as in the engine's served.pxd */

/* Mostly nothing, sometimes up to 10 microseconds, rarely up to a millisecond, and very rarely
   longer than waiting ranks take to look for signals; for a while much more often at some of the
   places from which it is called. */
static __attribute__((noinline, unused)) void delay_randomly(void)
{
    static __thread uint64_t random, calls, slow_places;
    const uint64_t place = (uint64_t)__builtin_return_address(0);
    const int error = errno;
    struct timespec time;
    if (random == 0) {
        clock_gettime(CLOCK_MONOTONIC, &time);
        random = (uint64_t)time.tv_nsec ^ (uint64_t)gettid() << 32 ^ (uint64_t)&random ^ 1;
    }
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    if (calls++ % 4096 == 0)
        slow_places = random;
    unsigned drawn = random >> 40 & 1023;
    if ((place ^ slow_places) * 0x9E3779B97F4A7C15 >> 61 == 0)
        drawn /= 128;
    if (drawn == 0) {
        time.tv_sec = 0;
        time.tv_nsec = random % 1000000 + (random >> 20 & 127 ? 0 : LOOK);
        nanosleep(&time, NULL);
    } else if (drawn < 4) {
        sched_yield();
    } else if (drawn < 32) {
        for (volatile unsigned left = random % 4096; left > 0; left--)
            ;
    }
    errno = error;
}

#define WITH_DELAYS(call)                                                                          \
    ({                                                                                             \
        delay_randomly();                                                                          \
        __typeof__(call) result_of_call = (call);                                                  \
        delay_randomly();                                                                          \
        result_of_call;                                                                            \
    })

#define __atomic_load_n(...) WITH_DELAYS(__atomic_load_n(__VA_ARGS__))
#define __atomic_compare_exchange_n(...) WITH_DELAYS(__atomic_compare_exchange_n(__VA_ARGS__))
#define __atomic_store_n(...)                                                                      \
    (delay_randomly(), __atomic_store_n(__VA_ARGS__), delay_randomly())
#define pthread_mutex_lock(mutex) WITH_DELAYS(pthread_mutex_lock(mutex))
#define pthread_mutex_trylock(mutex) WITH_DELAYS(pthread_mutex_trylock(mutex))
#define pthread_mutex_unlock(mutex) WITH_DELAYS(pthread_mutex_unlock(mutex))
#define clock_gettime(...) WITH_DELAYS(clock_gettime(__VA_ARGS__))
#define process_vm_readv(...) WITH_DELAYS(process_vm_readv(__VA_ARGS__))
#define process_vm_writev(...) WITH_DELAYS(process_vm_writev(__VA_ARGS__))
/* Not around numbers that are reinterpreted. */
#define memcpy(to, from, size)                                                                     \
    (__builtin_constant_p(size) ? memcpy(to, from, size) : WITH_DELAYS(memcpy(to, from, size)))
