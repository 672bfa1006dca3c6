#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/comm/shm/reduce_table.h"

#pragma GCC optimize("O3", "fp-contract=off")
#define LOCKSTEP_ISA baseline
#include "lockstep/comm/shm/reduce_kernels.h"
