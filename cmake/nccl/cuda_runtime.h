// What nccl.h wants of CUDA: the name of a stream. So NCCL compiles with its own header alone, without a CUDA toolkit.
#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
