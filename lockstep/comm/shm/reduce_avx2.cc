#if defined(__x86_64__)
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/comm/shm/reduce.h"

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,f16c")
#define LOCKSTEP_ISA avx2
#include "lockstep/comm/shm/reduce_kernels.h"
#endif
