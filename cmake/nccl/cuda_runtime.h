// The only name of CUDA that nccl.h uses, the type of a stream, so that NCCL's header compiles without a CUDA toolkit.
#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
