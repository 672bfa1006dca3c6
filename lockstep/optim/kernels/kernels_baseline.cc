// The optimizers' kernels, compiled without instruction set extensions.
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/kernels/kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")
#define LOCKSTEP_ISA baseline
#include "lockstep/optim/kernels/kernels_body.h"
