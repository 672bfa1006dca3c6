// Chooses the kernels of the best instruction set once per process and forwards to them.
#include "lockstep/optim/kernels/kernels.h"

#include "lockstep/optim/kernels/kernels_isa.h"

namespace lockstep::optim {
namespace {

struct OptimizerKernels {
  void (*sgd)(const KernelArgs&, const SgdScalars&);
  void (*adam)(const KernelArgs&, const AdamScalars&);
  void (*adagrad)(const KernelArgs&, const AdagradScalars&);
  void (*lamb)(const KernelArgs&, const LambScalars&);
  void (*lars)(const KernelArgs&, const LarsScalars&);
  SquaredNorms (*measure_lamb)(const KernelArgs&, const LambScalars&);
  SquaredNorms (*measure_lars)(const KernelArgs&, const LarsScalars&);
  double (*sum_of_squares)(const KernelArgs&);
  double (*tensor_sum_of_squares)(at::ScalarType, const void*, std::size_t);
  void (*scale)(at::ScalarType, void*, std::size_t, double);
  void (*clamp)(at::ScalarType, void*, std::size_t, double);
  void (*update_ema)(at::ScalarType, void*, const void*, std::size_t, double);
};

/// The kernels in namespace `isa`, one per instruction set.
#define LOCKSTEP_OPTIMIZER_KERNELS(isa)                                                                        \
  {isa::update,        isa::update,         isa::update,         isa::update, isa::update, isa::measure_norms, \
   isa::measure_norms, isa::sum_of_squares, isa::sum_of_squares, isa::scale,  isa::clamp,  isa::update_ema}

OptimizerKernels choose_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return LOCKSTEP_OPTIMIZER_KERNELS(avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return LOCKSTEP_OPTIMIZER_KERNELS(avx2);
#endif
  return LOCKSTEP_OPTIMIZER_KERNELS(baseline);
}

const OptimizerKernels& kernels() {
  static const OptimizerKernels best = choose_kernels();
  return best;
}

}  // namespace

void update(const KernelArgs& args, const SgdScalars& scalars) { kernels().sgd(args, scalars); }
void update(const KernelArgs& args, const AdamScalars& scalars) { kernels().adam(args, scalars); }
void update(const KernelArgs& args, const AdagradScalars& scalars) { kernels().adagrad(args, scalars); }
void update(const KernelArgs& args, const LambScalars& scalars) { kernels().lamb(args, scalars); }
void update(const KernelArgs& args, const LarsScalars& scalars) { kernels().lars(args, scalars); }
SquaredNorms measure_norms(const KernelArgs& args, const LambScalars& scalars) {
  return kernels().measure_lamb(args, scalars);
}
SquaredNorms measure_norms(const KernelArgs& args, const LarsScalars& scalars) {
  return kernels().measure_lars(args, scalars);
}
double sum_of_squares(const KernelArgs& args) { return kernels().sum_of_squares(args); }
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count) {
  return kernels().tensor_sum_of_squares(dtype, data, count);
}
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor) {
  kernels().scale(dtype, data, count, factor);
}
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max) {
  kernels().clamp(dtype, data, count, max);
}
void update_ema(at::ScalarType dtype, void* average, const void* data, std::size_t count, double decay) {
  kernels().update_ema(dtype, average, data, count, decay);
}

at::ScalarType state_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace lockstep::optim
