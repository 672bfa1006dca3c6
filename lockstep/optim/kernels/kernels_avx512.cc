// The optimizers' kernels, compiled for AVX-512.
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/kernels/kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#endif
#define LOCKSTEP_ISA avx512
#include "lockstep/optim/kernels/kernels_body.h"
