// The optimizers' kernels, compiled for AVX2.
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/kernels/kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")
#endif
#define LOCKSTEP_ISA avx2
#include "lockstep/optim/kernels/kernels_body.h"
