/* A library that hands calls on to another, and notes how long they take.

   Compiled with FUNCTIONS, which is F(name) for each of them, and VARIABLE, which names the one in
   the environment that has the path of the other library. Arguments are integers and pointers, at
   most 14, of which those beyond the first six may be a struct of 64 bytes: what a function does not
   have is whatever is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
typedef long Word;
typedef Word Function(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                      Word);

enum {
#define F(name) PLACE_##name,
    FUNCTIONS
#undef F
    COUNT
};

/* Of the main thread, and of all others; in nanoseconds. Not exported: two such libraries are in one
   process, and would share what is. */
static struct Times { long long calls, longest; } all_times[2][COUNT];

static Function *function_at(int place, const char *name) {
    static Function *found[COUNT];
    static void *library;
    if (!library)
        library = dlopen(getenv(VARIABLE), RTLD_LAZY);
    if (!found[place])
        found[place] = library ? (Function *)dlsym(library, name) : NULL;
    if (!found[place]) {
        fprintf(stderr, "traced: no %s in %s\n", name, getenv(VARIABLE));
        abort();
    }
    return found[place];
}

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static Word traced(int place, const char *name, const Word *a) {
    Function *function = function_at(place, name);
    struct Times *times = &all_times[syscall(SYS_gettid) != getpid()][place];
    long long began = now();
    Word result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
                           a[12], a[13]);
    long long taken = now() - began;
    times->calls++;
    if (taken > times->longest)
        times->longest = taken;
    return result;
}

API void *traced_times(void) { return all_times; }

#define F(name)                                                                                   \
    API Word name(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j, \
                  Word k, Word l, Word m, Word n) {                                               \
        Word all[] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n};                                  \
        return traced(PLACE_##name, #name, all);                                                  \
    }
FUNCTIONS
