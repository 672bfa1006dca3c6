#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/comm/shm/reduce_table.h"

#pragma GCC optimize("O3", "fp-contract=off")
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")
#endif
#define LOCKSTEP_ISA avx2
#include "lockstep/comm/shm/reduce_kernels.h"
