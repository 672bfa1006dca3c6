#include "lockstep/comm/shm/reduce.h"

#include "lockstep/comm/shm/reduce_isa.h"

namespace lockstep::comm {

namespace {

using Loops = void (*)(const Reduction&);

Loops best_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return avx512::reduce;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return avx2::reduce;
#endif
  return baseline::reduce;
}

}  // namespace

void reduce(const Reduction& reduction) {
  static const Loops loops = best_loops();
  loops(reduction);
}

}  // namespace lockstep::comm
