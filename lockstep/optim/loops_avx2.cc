#if defined(__x86_64__)
#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/loops.h"

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,f16c")
#define LOCKSTEP_ISA avx2
#include "lockstep/optim/clip_loops_body.h"
#include "lockstep/optim/loops_body.h"
#include "lockstep/optim/norm_loops_body.h"
#endif
