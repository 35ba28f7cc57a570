/* Kernels: those of kernels.cu, compiled by the host's compiler, which streams run one thread after the
   other. What a launch reads and writes follows from its arguments. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

static __thread struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;

#include "kernels.cu"

enum { MOST_ARGUMENTS = 6, MOST_TOUCHES = MOST_MEMBERS + MOST_ARGUMENTS };

typedef union { char *pointer; double share; long long count; } Value;

/* `takes`: what its arguments are, in their order: vectors that are written (w) and read (r), those of
   the dtype that travels (W, R), a flag that is written (f), a share (s), the members of a mean (m),
   and the number of elements (n). */
struct Kernel {
    const char *name, *takes;
    size_t size, travels;
    void (*call)(const Value *);
};

struct Launch {
    const Kernel *kernel;
    unsigned blocks, threads;
    Value values[MOST_ARGUMENTS];
    Members members;
    Touch touches[MOST_TOUCHES];
    int touch_count;
};

#define P(i) ((void *)v[i].pointer)
#define CALL(name, ...) static void call_##name(const Value *v) { name(__VA_ARGS__); }
#define CALLS(type)                                                                               \
    CALL(combine_##type, P(0), P(1), v[2].share, P(3), v[4].share, v[5].count)                     \
    CALL(mean_##type, P(0), *(const Members *)P(1), v[2].count)                                    \
    CALL(add_change_##type, P(0), P(1), P(2), P(3), v[4].count)                                    \
    CALL(all_finite_##type, P(0), P(1), v[2].count)                                                \
    CALL(all_bounded_##type, P(0), P(1), v[2].count)                                               \
    CALL(finite_change_##type, P(0), P(1), P(2), P(3), v[4].count)
#define CODEC_CALLS(pair)                                                                         \
    CALL(encode_##pair, P(0), P(1), P(2), v[3].count)                                              \
    CALL(decode_##pair, P(0), P(1), P(2), v[3].count)
CALLS(float32)
CALLS(float64)
CALLS(float16)
CALLS(bfloat16)
CODEC_CALLS(float32_float16)
CODEC_CALLS(float32_bfloat16)
CODEC_CALLS(float64_float16)
CODEC_CALLS(float64_bfloat16)

#define ENTRY(name, takes, size, travels) {#name, takes, size, travels, call_##name}
#define ENTRIES(type)                                                                             \
    ENTRY(combine_##type, "wrsrsn", sizeof(type), 0), ENTRY(mean_##type, "wmn", sizeof(type), 0),  \
    ENTRY(add_change_##type, "wrrrn", sizeof(type), 0),                                            \
    ENTRY(all_finite_##type, "frn", sizeof(type), 0),                                              \
    ENTRY(all_bounded_##type, "frn", sizeof(type), 0),                                             \
    ENTRY(finite_change_##type, "frrrn", sizeof(type), 0)
#define CODEC_ENTRIES(type, wire)                                                                 \
    ENTRY(encode_##type##_##wire, "Wrrn", sizeof(type), sizeof(wire)),                             \
    ENTRY(decode_##type##_##wire, "wRrn", sizeof(type), sizeof(wire))
static const Kernel kernels[] = {
    ENTRIES(float32), ENTRIES(float64), ENTRIES(float16), ENTRIES(bfloat16),
    CODEC_ENTRIES(float32, float16), CODEC_ENTRIES(float32, bfloat16),
    CODEC_ENTRIES(float64, float16), CODEC_ENTRIES(float64, bfloat16),
};
enum { KERNELS_COUNT = sizeof kernels / sizeof *kernels };

const Kernel *find_kernel(const char *name) {
    for (int i = 0; i < KERNELS_COUNT; i++)
        if (!strcmp(kernels[i].name, name))
            return &kernels[i];
    return NULL;
}

/* Return the kernel of a handle, NULL where it is none's. */
const Kernel *kernel_of(const void *handle) {
    const Kernel *kernel = handle;
    return kernel >= kernels && kernel < kernels + KERNELS_COUNT ? kernel : NULL;
}

static void touch(Launch *launch, const void *address, size_t size, int writes) {
    if (size)
        launch->touches[launch->touch_count++] = (Touch){address, size, writes};
}

Launch *make_launch(const Kernel *kernel, unsigned blocks, unsigned threads, void **arguments) {
    Launch *launch = calloc(1, sizeof *launch);
    launch->kernel = kernel;
    launch->blocks = blocks;
    launch->threads = threads;
    long long n = *(long long *)arguments[strlen(kernel->takes) - 1];
    for (int i = 0; kernel->takes[i]; i++) {
        char what = kernel->takes[i];
        if (what == 'm') {
            launch->members = *(Members *)arguments[i];
            for (int j = 0; j < launch->members.count; j++)
                touch(launch, launch->members.vectors[j], n * kernel->size, 0);
            continue;
        }
        launch->values[i] = *(Value *)arguments[i];
        if (strchr("wr", what))
            touch(launch, launch->values[i].pointer, n * kernel->size, what == 'w');
        if (strchr("WR", what))
            touch(launch, launch->values[i].pointer, n * kernel->travels, what == 'W');
        if (what == 'f')
            touch(launch, launch->values[i].pointer, n ? sizeof(int) : 0, 1);
    }
    return launch;
}

const char *name_of(const Launch *launch) { return launch->kernel->name; }

const Touch *touches_of(const Launch *launch, int *count) {
    *count = launch->touch_count;
    return launch->touches;
}

void run_launch(const Launch *launch) {
    Value values[MOST_ARGUMENTS];
    Members members = launch->members;
    for (int j = 0; j < members.count; j++)
        members.vectors[j] = reach(members.vectors[j]);
    for (int i = 0; launch->kernel->takes[i]; i++) {
        values[i] = launch->values[i];
        if (strchr("wrWRf", launch->kernel->takes[i]))
            values[i].pointer = reach(values[i].pointer);
        if (launch->kernel->takes[i] == 'm')
            values[i].pointer = (char *)&members;
    }
    gridDim.x = launch->blocks;
    blockDim.x = launch->threads;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            launch->kernel->call(values);
}
