#include "lockstep/optim/loops.h"

#include "lockstep/optim/loops_isa.h"

namespace lockstep::optim {
namespace {

struct Loops {
  void (*sgd)(const Run&, const SgdRule&);
  void (*adam)(const Run&, const AdamRule&);
  double (*sum_of_squares)(const Run&);
};

Loops best_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return {avx512::update, avx512::update, avx512::sum_of_squares};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return {avx2::update, avx2::update, avx2::sum_of_squares};
#endif
  return {baseline::update, baseline::update, baseline::sum_of_squares};
}

const Loops& loops() {
  static const Loops best = best_loops();
  return best;
}

}  // namespace

void update(const Run& run, const SgdRule& rule) { loops().sgd(run, rule); }
void update(const Run& run, const AdamRule& rule) { loops().adam(run, rule); }
double sum_of_squares(const Run& run) { return loops().sum_of_squares(run); }

at::ScalarType state_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace lockstep::optim
