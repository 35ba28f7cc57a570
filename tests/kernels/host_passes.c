/* The host's passes over vectors, for programs that load them. */

#include "kernels.h"

void passes_of(Kernels *kernels, char dtype) { choose_kernels(kernels, dtype); }

void codec_of(Codec *codec, char dtype, char wire) { choose_codec(codec, dtype, wire); }
