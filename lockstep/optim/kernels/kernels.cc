#include "lockstep/optim/kernels/kernels.h"

#include "lockstep/optim/kernels/kernels_isa.h"

namespace lockstep::optim {
namespace {

struct Loops {
  void (*sgd)(const Run&, const SgdRule&);
  void (*adam)(const Run&, const AdamRule&);
  void (*adagrad)(const Run&, const AdagradRule&);
  void (*lamb)(const Run&, const LambRule&);
  void (*lars)(const Run&, const LarsRule&);
  Squares (*measure_lamb)(const Run&, const LambRule&);
  Squares (*measure_lars)(const Run&, const LarsRule&);
  double (*sum_of_squares)(const Run&);
  double (*plain_squares)(at::ScalarType, const void*, std::size_t);
  void (*scale)(at::ScalarType, void*, std::size_t, double);
  void (*clamp)(at::ScalarType, void*, std::size_t, double);
  void (*blend)(at::ScalarType, void*, const void*, std::size_t, double);
};

/// Of one instruction set, a namespace.
#define LOCKSTEP_LOOPS(isa)                                                                        \
  {isa::update,  isa::update,         isa::update,         isa::update, isa::update, isa::measure, \
   isa::measure, isa::sum_of_squares, isa::sum_of_squares, isa::scale,  isa::clamp,  isa::blend}

Loops best_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return LOCKSTEP_LOOPS(avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return LOCKSTEP_LOOPS(avx2);
#endif
  return LOCKSTEP_LOOPS(baseline);
}

const Loops& loops() {
  static const Loops best = best_loops();
  return best;
}

}  // namespace

void update(const Run& run, const SgdRule& rule) { loops().sgd(run, rule); }
void update(const Run& run, const AdamRule& rule) { loops().adam(run, rule); }
void update(const Run& run, const AdagradRule& rule) { loops().adagrad(run, rule); }
void update(const Run& run, const LambRule& rule) { loops().lamb(run, rule); }
void update(const Run& run, const LarsRule& rule) { loops().lars(run, rule); }
Squares measure(const Run& run, const LambRule& rule) { return loops().measure_lamb(run, rule); }
Squares measure(const Run& run, const LarsRule& rule) { return loops().measure_lars(run, rule); }
double sum_of_squares(const Run& run) { return loops().sum_of_squares(run); }
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count) {
  return loops().plain_squares(dtype, data, count);
}
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor) {
  loops().scale(dtype, data, count, factor);
}
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max) { loops().clamp(dtype, data, count, max); }
void blend(at::ScalarType dtype, void* average, const void* data, std::size_t count, double keep) {
  loops().blend(dtype, average, data, count, keep);
}

at::ScalarType state_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace lockstep::optim
