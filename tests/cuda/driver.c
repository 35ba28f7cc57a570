/* The driver's functions, as libcuda.so.1 exports them, and what tests have beside. */
#include "stand_in.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 16, CONTEXT = 0xC0, MOST_DEVICES = 8 };

static int initialized, device_count = 1;
Result failure;
static __thread int contexts[DEPTH], depth;
static int captures;         /* streams that are being captured, each for all threads to heed */
static __thread int relaxed; /* but for those that say that they need not */

int current_device(void) { return depth && contexts[depth - 1] ? contexts[depth - 1] - CONTEXT : -1; }

/* What breaks a capture, from whatever thread: it is in no stream that could be captured. */
void break_captures(const char *what) {
    if (captures && !relaxed)
        end(MISUSE, "%s while a graph is being captured", what);
}

/* Errors, devices, contexts */

API Result cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    if (!initialized) {
        initialized = 1;
        const char *number = getenv("STAND_IN_DEVICES");
        device_count = number ? atoi(number) : 1;
        read_settings();
        make_stream(1); /* the legacy default stream */
        install_handler();
    }
    pthread_mutex_unlock(&lock);
    return device_count ? failure : NO_DEVICE;
}

API Result cuGetErrorName(Result error, const char **name) {
    static const struct { Result error; const char *name; } names[] = {
        {SUCCESS, "CUDA_SUCCESS"},
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].error == error) {
            *name = names[i].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

API Result cuGetErrorString(Result error, const char **text) { return cuGetErrorName(error, text); }
API Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
API Result cuDeviceGetCount(int *number) { *number = device_count; return SUCCESS; }
API Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < device_count ? SUCCESS : INVALID_DEVICE;
}
API Result cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "stand-in %d", device);
    return SUCCESS;
}
API Result cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(CONTEXT + device);
    return initialized ? failure : NOT_INITIALIZED;
}
API Result cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
API Result cuCtxPushCurrent_v2(void *context) {
    if (depth == DEPTH)
        return OUT_OF_MEMORY;
    contexts[depth++] = (int)(uintptr_t)context;
    return SUCCESS;
}
API Result cuCtxPopCurrent_v2(void **context) {
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = (void *)(uintptr_t)contexts[depth];
    return SUCCESS;
}
API Result cuCtxSetCurrent(void *context) {
    depth = depth ? depth : 1;
    contexts[depth - 1] = (int)(uintptr_t)context;
    return SUCCESS;
}
API Result cuCtxGetCurrent(void **context) {
    *context = depth ? (void *)(uintptr_t)contexts[depth - 1] : NULL;
    return SUCCESS;
}
API Result cuCtxGetDevice(int *device) {
    *device = current_device();
    return *device < 0 ? INVALID_CONTEXT : SUCCESS;
}
API Result cuCtxGetStreamPriorityRange(int *lowest, int *highest) {
    *lowest = 0;
    *highest = -5;
    return current_device() < 0 ? INVALID_CONTEXT : SUCCESS;
}

/* Memory */

API Result cuMemAlloc_v2(unsigned long long *address, size_t size) {
    IN_CONTEXT({
        break_captures("cuMemAlloc");
        *address = (uintptr_t)allocate(size, current_device());
        result = *address ? SUCCESS : OUT_OF_MEMORY;
    })
}
API Result cuMemFree_v2(unsigned long long address) {
    IN_CONTEXT({
        break_captures("cuMemFree");
        counts.blocking++;
        result = release((void *)(uintptr_t)address, 0);
    })
}
API Result cuMemGetInfo_v2(size_t *left, size_t *total) {
    IN_CONTEXT({
        *total = (size_t)1 << 40;
        *left = *total - counts.device_bytes;
    })
}
API Result cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    IN_CONTEXT({
        break_captures("cuMemHostAlloc");
        counts.blocking++;
        *address = allocate(size, -1);
        result = *address ? SUCCESS : OUT_OF_MEMORY;
    })
}
API Result cuMemFreeHost(void *address) {
    IN_CONTEXT({
        break_captures("cuMemFreeHost");
        counts.blocking++;
        result = release(address, 1);
    })
}
API Result cuPointerGetAttribute(void *value, int attribute, unsigned long long address) {
    enum { ATTRIBUTE_CONTEXT = 1, MEMORY_TYPE = 2, IS_MANAGED = 8, ORDINAL = 9, HOST = 1, DEVICE = 2 };
    Result result = SUCCESS;
    begin_call();
    Region *region = find((void *)(uintptr_t)address);
    if (failure)
        result = failure;
    else if (!region)
        result = INVALID_VALUE;
    else if (attribute == ATTRIBUTE_CONTEXT)
        *(void **)value = (void *)(uintptr_t)(CONTEXT + (region->device < 0 ? 0 : region->device));
    else if (attribute == MEMORY_TYPE)
        *(unsigned *)value = region->device < 0 ? HOST : DEVICE;
    else if (attribute == IS_MANAGED)
        *(unsigned *)value = 0;
    else if (attribute == ORDINAL)
        *(int *)value = region->device < 0 ? 0 : region->device;
    else
        result = NOT_SUPPORTED;
    end_call();
    return result;
}

static int is_on_device(const void *address) {
    Region *region = find(address);
    return region && region->device >= 0;
}
static Result copy(void *to, const void *from, size_t size, void *handle, const char *what) {
    ON_STREAM(handle, {
        if (size) {
            counts.copies++;
            Operation *operation = make_operation(COPY, what);
            operation->to = to;
            operation->from = from;
            operation->size = size;
            operation->to_host = is_on_device(from) && !is_on_device(to);
            enqueue(stream, operation);
        }
    })
}
API Result cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t size, void *stream) {
    return copy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size, stream, "a copy");
}
API Result cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream) {
    return copy(to, (void *)(uintptr_t)from, size, stream, "a copy to the host");
}
API Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream) {
    return copy((void *)(uintptr_t)to, from, size, stream, "a copy to the device");
}
API Result cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t size, void *stream) {
    return copy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size, stream, "a copy on the device");
}
API Result cuMemsetD8Async(unsigned long long to, unsigned char value, size_t size, void *handle) {
    ON_STREAM(handle, {
        Operation *operation = make_operation(FILL, "a fill");
        operation->to = (char *)(uintptr_t)to;
        operation->value = value;
        operation->size = size;
        enqueue(stream, operation);
    })
}
static Result write(unsigned long long to, unsigned value, void *handle) {
    ON_STREAM(handle, {
        Region *region = find((void *)(uintptr_t)to);
        if (!region || region->device >= 0)
            result = NOT_SUPPORTED;
        else {
            Operation *operation = make_operation(NUMBER, "a number");
            operation->to = (char *)(uintptr_t)to;
            operation->value = value;
            enqueue(stream, operation);
        }
    })
}
static int refuses; /* cuStreamWriteValue32, as some devices do */
API Result cuStreamWriteValue32_v2(void *handle, unsigned long long to, unsigned value,
                                   unsigned flags) {
    return refuses || flags ? NOT_SUPPORTED : write(to, value, handle);
}
API Result cuMemsetD32Async(unsigned long long to, unsigned value, size_t count, void *handle) {
    return count != 1 ? NOT_SUPPORTED : write(to, value, handle);
}

/* Streams and events */

API Result cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    (void)priority;
    IN_CONTEXT({
        *handle = make_stream(!(flags & 1));
        result = *handle ? SUCCESS : OUT_OF_MEMORY;
    })
}
API Result cuStreamCreate(void **handle, unsigned flags) {
    return cuStreamCreateWithPriority(handle, flags, 0);
}
API Result cuStreamDestroy_v2(void *handle) {
    begin_call();
    Stream *stream = stream_of(handle);
    Result result = stream ? failure : INVALID_HANDLE;
    if (current_device() < 0)
        result = INVALID_CONTEXT;
    else if (stream)
        remove_stream(stream); /* also after a failure: there are only so many */
    end_call();
    return result;
}
API Result cuStreamQuery(void *handle) {
    ON_STREAM(handle, {
        break_captures("cuStreamQuery");
        if (stream->ended < stream->issued)
            result = NOT_READY;
        else
            see(&stream->clock);
    })
}
API Result cuStreamSynchronize(void *handle) {
    ON_STREAM(handle, {
        Clock clock = stream->clock;
        break_captures("cuStreamSynchronize");
        counts.blocking++;
        wait_for(stream, stream->issued);
        see(&clock);
    })
}
API Result cuCtxSynchronize(void) { IN_CONTEXT({ counts.blocking++; wait_for_all(); }) }
API Result cuThreadExchangeStreamCaptureMode(int *mode) {
    enum { GLOBAL = 0, RELAXED = 2 };
    int before = relaxed ? RELAXED : GLOBAL;
    relaxed = *mode == RELAXED;
    *mode = before;
    return failure;
}
API Result cuStreamIsCapturing(void *handle, int *status) {
    ON_STREAM(handle, *status = stream->capturing)
}
API Result cuStreamWaitEvent(void *handle, void *pointer, unsigned flags) {
    (void)flags;
    ON_STREAM(handle, {
        Event *event = pointer;
        if (event->stream) {
            Operation *operation = make_operation(NOTHING, "a wait");
            operation->after.of[event->stream->number] = event->number;
            merge(&stream->clock, &event->clock);
            enqueue(stream, operation);
        }
    })
}
API Result cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    IN_CONTEXT(*event = calloc(1, sizeof(Event)))
}
API Result cuEventDestroy_v2(void *event) { free(event); return failure; }
API Result cuEventRecord(void *pointer, void *handle) {
    ON_STREAM(handle, {
        Event *event = pointer;
        enqueue(stream, make_operation(NOTHING, "an event"));
        event->stream = stream;
        event->number = stream->issued;
        event->clock = stream->clock;
    })
}
API Result cuEventQuery(void *pointer) {
    IN_CONTEXT({
        Event *event = pointer;
        break_captures("cuEventQuery");
        if (event->stream && event->stream->ended < event->number)
            result = NOT_READY;
        else if (event->stream)
            see(&event->clock);
    })
}
API Result cuEventSynchronize(void *pointer) {
    IN_CONTEXT({
        Event *event = pointer;
        Clock clock = event->clock;
        break_captures("cuEventSynchronize");
        counts.blocking++;
        if (event->stream)
            wait_for(event->stream, event->number);
        see(&clock);
    })
}
API Result cuLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
    ON_STREAM(handle, {
        Operation *operation = make_operation(CALL, "a function of the host");
        operation->function = function;
        operation->argument = argument;
        enqueue(stream, operation);
    })
}

/* For tests */

API void stand_in_counts(struct Counts *copy_of_counts) {
    pthread_mutex_lock(&lock);
    *copy_of_counts = counts;
    pthread_mutex_unlock(&lock);
}
/* Keep a stream busy. */
API Result stand_in_sleep(void *handle, long microseconds) {
    ON_STREAM(handle, {
        Operation *operation = make_operation(SLEEP, "a sleep");
        operation->microseconds = microseconds;
        enqueue(stream, operation);
    })
}
/* Let a stream go on only once the gates are opened. */
API Result stand_in_hold(void *handle) {
    ON_STREAM(handle, {
        Operation *operation = make_operation(GATE, "a gate");
        operation->gate = ++gates_closed;
        enqueue(stream, operation);
    })
}
API void stand_in_open(void) {
    pthread_mutex_lock(&lock);
    gates_opened = gates_closed;
    copies_let = -1;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}
/* Let the host touch device memory that is allocated from now on, or not. */
API void stand_in_open_memory(int open) {
    pthread_mutex_lock(&lock);
    is_open = open;
    pthread_mutex_unlock(&lock);
}
/* Let only so many more copies to the host begin before the gates are opened. */
API void stand_in_hold_copies(long number) {
    pthread_mutex_lock(&lock);
    copies_let = number;
    pthread_mutex_unlock(&lock);
}
static void hold(int hold) {
    pthread_mutex_lock(&lock);
    held = hold;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}
/* No call but those that need no context returns, and no stream goes on, until they are let. */
API void stand_in_hold_calls(void) { hold(1); }
API void stand_in_let_calls(void) { hold(0); }
/* cuStreamWriteValue32 is not supported from now on, or is again. */
API void stand_in_refuse_numbers(int refuse) { refuses = refuse; }
/* Every call fails like this from now on, and the host may touch what was being copied; 0: none does
   any more. */
API void stand_in_fail(Result error) {
    pthread_mutex_lock(&lock);
    if (error) /* first: a host that learns of the failure touches what has not arrived */
        unprotect_all();
    failure = error;
    pthread_mutex_unlock(&lock);
}
/* Devices have no more memory than this from now on, for all allocations together; 0: any. */
API void stand_in_limit(long long bytes) { limit = bytes; }
/* What is said of a mistake goes to this file descriptor. */
API void stand_in_report_to(int descriptor) { reports = descriptor; }
/* A graph is being captured on this stream, or no longer. */
API Result stand_in_capture(void *handle, int status) {
    ON_STREAM(handle, {
        captures += status - stream->capturing;
        stream->capturing = status;
    })
}
