#include <bit>
#include <cstddef>
#include <cstdint>

#include "lockstep/optim/loops.h"

#pragma GCC optimize("O3", "fp-contract=off")
#define LOCKSTEP_ISA baseline
#include "lockstep/optim/clip_loops_body.h"
#include "lockstep/optim/loops_body.h"
#include "lockstep/optim/norm_loops_body.h"
