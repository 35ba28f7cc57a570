/* The kernels for devices as functions of the host: a call is one thread's, of the block and in the
   grid that were set before. */

struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;

#include "kernels.cu"
