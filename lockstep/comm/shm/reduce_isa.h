// The kernels of reduce() and convert(), compiled for each instruction set. The caller must not call the functions of
// an instruction set that the machine does not have.
#pragma once

#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {

namespace baseline {
void reduce(const Reduction& r);
void convert(const Conversion& c);
}  // namespace baseline
#if defined(__x86_64__)
namespace avx2 {
void reduce(const Reduction& r);  // requires avx2 and f16c
void convert(const Conversion& c);
}  // namespace avx2
namespace avx512 {
void reduce(const Reduction& r);  // requires avx512f, avx512bw, avx512vl and avx512dq
void convert(const Conversion& c);
}  // namespace avx512
#endif

}  // namespace lockstep::comm
