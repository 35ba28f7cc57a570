/* The driver's functions for modules and kernels. What is in a module's code is not looked at: its
   kernels are those of kernels.c. */
#include "stand_in.h"

#include <string.h>

API Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    enum { MULTIPROCESSORS = 16, THREADS_PER_MULTIPROCESSOR = 39, MAJOR = 75, MINOR = 76 };
    (void)device;
    switch (attribute) {
    case MULTIPROCESSORS: *value = 2; break;
    case THREADS_PER_MULTIPROCESSOR: *value = 512; break;
    case MAJOR: *value = 9; break;
    case MINOR: *value = 0; break;
    default: return INVALID_VALUE;
    }
    return failure;
}
API Result cuModuleLoadData(void **module, const void *image) {
    IN_CONTEXT({
        break_captures("cuModuleLoadData");
        *module = &kernel_of;
        result = memcmp(image, "\177ELF", 4) ? INVALID_IMAGE : SUCCESS;
    })
}
API Result cuModuleGetFunction(void **function, void *module, const char *name) {
    IN_CONTEXT({
        *function = (void *)find_kernel(name);
        result = module != &kernel_of ? INVALID_HANDLE : *function ? SUCCESS : NOT_FOUND;
    })
}
API Result cuLaunchKernel(void *function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                          unsigned threads, unsigned threads_y, unsigned threads_z,
                          unsigned shared_bytes, void *handle, void **arguments, void **extra) {
    const Kernel *kernel = kernel_of(function);
    if (!kernel)
        return INVALID_HANDLE;
    if (!blocks || !threads || threads > 1024)
        return INVALID_VALUE;
    if (blocks_y * blocks_z * threads_y * threads_z != 1 || shared_bytes || extra)
        return NOT_SUPPORTED;
    ON_STREAM(handle, {
        Launch *launch = make_launch(kernel, blocks, threads, arguments);
        Operation *operation = make_operation(LAUNCH, name_of(launch));
        operation->launch = launch;
        enqueue(stream, operation);
    })
}
