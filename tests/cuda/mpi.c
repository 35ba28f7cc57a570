/* What a CUDA-aware MPI asks the driver for beside: memory that it registers is as good as any, and
   there are no IPC events, without which MPI copies through the host. */
#include "stand_in.h"

#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))

Result cuPointerGetAttribute(void *value, int attribute, unsigned long long address);
Result cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t size, void *stream);
Result cuStreamSynchronize(void *stream);

typedef struct { char bytes[64]; } Shared;

/* Of an address that the driver does not know everything is 0. */
API Result cuPointerGetAttributes(unsigned count, int *attributes, void **values,
                                  unsigned long long address) {
    enum { ATTRIBUTE_CONTEXT = 1 };
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(values[i], attributes[i], address))
            memset(values[i], 0, attributes[i] == ATTRIBUTE_CONTEXT ? sizeof(void *) : 4);
    return SUCCESS;
}
API Result cuPointerSetAttribute(const void *value, int attribute, unsigned long long address) {
    (void)value, (void)attribute, (void)address;
    return SUCCESS;
}
API Result cuMemGetAddressRange_v2(unsigned long long *start, size_t *size,
                                   unsigned long long address) {
    pthread_mutex_lock(&lock);
    Region *region = find((void *)(uintptr_t)address);
    if (region && start)
        *start = (uintptr_t)region->seen;
    if (region && size)
        *size = region->size;
    pthread_mutex_unlock(&lock);
    return region ? SUCCESS : INVALID_VALUE;
}
API Result cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    (void)address, (void)size, (void)flags;
    return SUCCESS;
}
API Result cuMemHostUnregister(void *address) {
    (void)address;
    return SUCCESS;
}
API Result cuMemcpy(unsigned long long to, unsigned long long from, size_t size) {
    Result result = cuMemcpyAsync(to, from, size, NULL);
    return result ? result : cuStreamSynchronize(NULL);
}
API Result cuDeviceCanAccessPeer(int *can, int device, int other) {
    *can = device == other;
    return SUCCESS;
}

API Result cuIpcGetEventHandle(Shared *handle, void *event) {
    (void)handle, (void)event;
    return NOT_SUPPORTED;
}
API Result cuIpcOpenEventHandle(void **event, Shared handle) {
    (void)event, (void)handle;
    return NOT_SUPPORTED;
}
