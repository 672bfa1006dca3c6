// The optimizers' kernels, compiled for AVX-512.
#if defined(__x86_64__)
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/kernels/kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#define LOCKSTEP_ISA avx512
#include "lockstep/optim/kernels/norm_kernels_body.h"
#include "lockstep/optim/kernels/tensor_kernels_body.h"
#include "lockstep/optim/kernels/update_kernels_body.h"
#endif
