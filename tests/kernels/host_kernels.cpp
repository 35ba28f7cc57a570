/* The kernels for devices as functions of the host: a call is one thread's, of the block and in the
   grid that were set before. */

struct Place {
    unsigned x;
};

extern "C" {
Place blockIdx, threadIdx, blockDim, gridDim;
}
#define __global__
#include "kernels.cu"
