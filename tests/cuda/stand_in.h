/* A stand-in for libcuda.so.1, for tests on machines without a GPU.

   - Device memory is where the host cannot touch it: an access ends the process.
     Memory that is allocated while a test has opened it is not protected, so that any MPI is as good
     as a CUDA-aware one.
   - So does one to pinned memory while a copy to it has not been seen to end, or a write while a
     copy from it has not, however fast the copy was. Less than a page of memory is watched as a
     whole.
   - Every stream is a thread, which sleeps at random before each operation (STAND_IN_DELAY,
     microseconds): streams run late, and in any order that CUDA allows.
   - Each operation has a clock of all that it comes after. Two that touch the same bytes, one of
     them writing, and that nothing orders end the process, in whatever order they would have run.
   - Kernels are those of kernels.cu alone, and operations like copies. One that is given host memory
     that is not pinned ends the process.
   - Other processes can map device memory where STAND_IN_IPC is set, or a test enables that; then
     no MPI may touch it any more, even where a test has opened it. Two
     operations of theirs on the same bytes are ordered only where the one's process has seen it
     end before the other is begun; else the latter's is ended. So is one that frees memory which
     another has mapped.
   - A stream takes any number of operations, or as many as STAND_IN_QUEUE says: a call that finds it
     full blocks, and with it, as in a driver, all other calls of the process.
   - A stream writes a number to pinned memory of its own (cuStreamWriteValue32, or cuMemsetD32Async):
     the host sees all that comes before that as ended once it reads that memory, and not before.
   - Calls that block the host, and bytes, are counted.

   One lock guards everything; functions here are called with it. */
#ifndef STAND_IN_H
#define STAND_IN_H

#include <pthread.h>
#include <stddef.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801,
};
#define API __attribute__((visibility("default")))
enum { MOST_STREAMS = 64, MOST_REGIONS = 4096, MOST_ACCESSES = 65536 };

/* How a test learns from the exit status what was wrong. */
enum { DISORDER = 86, HOST_ACCESS = 87, MISUSE = 88 };

typedef int Result;
typedef unsigned long long Number;

/* Of each stream: how many of its operations. */
typedef struct { Number of[MOST_STREAMS]; } Clock;

/* Memory of a device, or pinned (device < 0): where applications see it, and where streams do; what
   all processes know of what they do with it, if it is shared; whether it is another's; what comes
   before the number that a stream has written there, if it has. */
typedef struct Table Table;
typedef struct {
    char *seen, *ours;
    size_t size;
    int device, used, file, imported, tells;
    Table *table;
    Clock told;
} Region;

/* A kernel of a module; one with the arguments that it was launched with; some bytes of those. */
typedef struct Kernel Kernel;
typedef struct Launch Launch;
typedef struct { const void *address; size_t size; int writes; } Touch;

typedef struct Operation {
    struct Operation *next;
    enum { NOTHING, COPY, FILL, LAUNCH, SLEEP, GATE, CALL, NUMBER } kind;
    const char *what;
    char *to;
    const char *from;
    size_t size;
    unsigned value;
    Launch *launch;
    long microseconds, gate;
    int to_host;
    void (*function)(void *);
    void *argument;
    Number number;
    Clock after, clock; /* what it waits for; all that it comes after */
} Operation;

/* `legacy`: it and the legacy default stream, number 0, wait for each other. */
typedef struct {
    int number, legacy, capturing;
    pthread_t thread;
    Operation *first, *last;
    Number issued, ended;
    Clock clock;
} Stream;

typedef struct { Stream *stream; Number number; Clock clock; } Event;

extern pthread_mutex_t lock;
extern pthread_cond_t moved;
extern Stream streams[MOST_STREAMS];
extern int stream_count;
extern long gates_closed, gates_opened; /* since the beginning */
extern long copies_let;                 /* to the host, before the gates are opened; < 0: all */
extern int held;                        /* no call returns, and no stream goes on */

/* Tests read them, in this order. */
extern struct Counts {
    long long blocking, copies, pageable, device_bytes, device_peak, pinned_bytes, pinned_peak;
} counts;

/* driver.c */
extern Result failure; /* sticky: every call returns it from then on */
int current_device(void);
void break_captures(const char *what);

/* A function's body, with the lock, where there is a context; `result` is what it returns. */
#define IN_CONTEXT(body)                                                                          \
    Result result = SUCCESS;                                                                      \
    if (current_device() < 0)                                                                     \
        return INVALID_CONTEXT;                                                                   \
    begin_call();                                                                                 \
    if (failure)                                                                                  \
        result = failure;                                                                         \
    else                                                                                          \
        body;                                                                                     \
    end_call();                                                                                   \
    return result;

/* Likewise, with the stream of a handle. */
#define ON_STREAM(handle, body)                                                                   \
    IN_CONTEXT({                                                                                  \
        Stream *stream = stream_of(handle);                                                       \
        if (!stream)                                                                              \
            result = INVALID_HANDLE;                                                              \
        else                                                                                      \
            body;                                                                                 \
    })

/* kernels.c */
const Kernel *find_kernel(const char *name);
const Kernel *kernel_of(const void *handle);
Launch *make_launch(const Kernel *kernel, unsigned blocks, unsigned threads, void **arguments);
const char *name_of(const Launch *launch);
const Touch *touches_of(const Launch *launch, int *count);
void run_launch(const Launch *launch);

/* ipc.c */
void unmap_table(Region *region);
void forget_mapping(Region *region);
int share_access(Region *region, size_t low, size_t high, int writes, const char *what);
void end_shared_access(Region *region, int entry);

/* memory.c */
extern long long limit; /* bytes of device memory; 0: none */
extern int is_open; /* the host may touch device memory, as an MPI does that is not CUDA-aware */
Region *find(const void *address);
void *reach(const void *address);
char *allocate(size_t size, int device);
Region *map_region(int file, size_t size, int device);
void unmap_region(Region *region);
Result release(void *address, int pinned);
int is_page(const Region *region);
void protect(Region *region, size_t low, size_t high, int protection);
void write_number(const Operation *operation);
void unprotect_all(void);
void install_handler(void);

/* order.c */
extern int reports; /* the file descriptor that they go to */
extern Clock host; /* what the host has seen to end */
void merge(Clock *clock, const Clock *other);
void see(const Clock *clock);
void check_order(const Stream *stream, const Operation *operation, const Clock *clock);
void end(int status, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

/* streams.c */
void begin_call(void);
void end_call(void);
Stream *make_stream(int legacy);
void remove_stream(Stream *stream);
Stream *stream_of(void *handle);
Operation *make_operation(int kind, const char *what);
void enqueue(Stream *stream, Operation *operation);
void wait_for(Stream *stream, Number number);
void wait_for_all(void);
void read_settings(void);

#endif
