// The loops, compiled for each instruction set. What the machine lacks must not be called.
#pragma once

#include "lockstep/optim/loops.h"

namespace lockstep::optim {

namespace baseline {
void update(const Run& run, const SgdRule& rule);
void update(const Run& run, const AdamRule& rule);
double sum_of_squares(const Run& run);
}  // namespace baseline
#if defined(__x86_64__)
namespace avx2 {  // needs avx2, f16c
void update(const Run& run, const SgdRule& rule);
void update(const Run& run, const AdamRule& rule);
double sum_of_squares(const Run& run);
}  // namespace avx2
namespace avx512 {  // needs avx512f, bw, vl, dq
void update(const Run& run, const SgdRule& rule);
void update(const Run& run, const AdamRule& rule);
double sum_of_squares(const Run& run);
}  // namespace avx512
#endif

}  // namespace lockstep::optim
