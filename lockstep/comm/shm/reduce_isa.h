// The loops of reduce(), compiled for each instruction set. What the machine lacks must not be called.
#pragma once

#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {

namespace baseline {
void reduce(const Reduction& r);
void convert(const Conversion& c);
}  // namespace baseline
#if defined(__x86_64__)
namespace avx2 {
void reduce(const Reduction& r);  // needs avx2, f16c
void convert(const Conversion& c);
}  // namespace avx2
namespace avx512 {
void reduce(const Reduction& r);  // needs avx512f, bw, vl, dq
void convert(const Conversion& c);
}  // namespace avx512
#endif

}  // namespace lockstep::comm
