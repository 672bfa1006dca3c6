// The optimizers' kernels, compiled for AVX2.
#if defined(__x86_64__)
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/kernels/kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,f16c")
#define LOCKSTEP_ISA avx2
#include "lockstep/optim/kernels/norm_kernels_body.h"
#include "lockstep/optim/kernels/tensor_kernels_body.h"
#include "lockstep/optim/kernels/update_kernels_body.h"
#endif
