#include "lockstep/comm/shm/reduce.h"

#include <cstring>

#include "lockstep/comm/shm/reduce_isa.h"

namespace lockstep::comm {

namespace {

struct ReduceKernels {
  void (*reduce)(const Reduction&);
  void (*convert)(const Conversion&);
};

ReduceKernels best_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return {avx512::reduce, avx512::convert};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return {avx2::reduce, avx2::convert};
#endif
  return {baseline::reduce, baseline::convert};
}

const ReduceKernels& kernels() {
  static const ReduceKernels best = best_kernels();
  return best;
}

}  // namespace

void reduce(const Reduction& reduction) { kernels().reduce(reduction); }

void convert(const Conversion& conversion) {
  if (conversion.from != conversion.to) return kernels().convert(conversion);
  if (conversion.count > 0)
    std::memcpy(conversion.output, conversion.input, conversion.count * c10::elementSize(conversion.from));
}

}  // namespace lockstep::comm
