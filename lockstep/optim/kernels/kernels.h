// The optimizers' kernels: they update a range of elements in one pass over gradients, parameter and state.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/base/simd/cpu_features.h"

namespace lockstep::optim::kernels {

/// The arguments of a kernel: `count` contiguous elements of a parameter, of its state tensors, and of the gradient of
/// each rank that has one. The dtypes are float, double, bfloat16 and half; gradients have the parameter's dtype. State
/// is double for double and float otherwise.
struct KernelArgs {
  at::ScalarType dtype;
  const void* const* gradients;
  std::size_t num_gradients;
  double divisor = 1;            // the gradient is the sum of `gradients`, added in their order, divided by this,
  double scale = 1;              // multiplied by this,
  double max = __builtin_inf();  // and clamped to [-max, max]; a NaN stays
  void* parameter;
  void* const* states;
  std::size_t count;
};

/// SGD as in torch::optim::SGD. Has one state tensor, the momentum buffer, if `momentum` is not 0.
struct SgdScalars {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  bool first;  // first update: the momentum buffer is set to the gradient
};
/// Adam as in torch::optim::Adam (Kingma and Ba, arXiv:1412.6980); with `decoupled`, AdamW (Loshchilov and Hutter,
/// arXiv:1711.05101). State: the first and second moments and, with amsgrad (Reddi, Kale and Kumar, arXiv:1904.09237),
/// the maximum of the second moment.
struct AdamScalars {
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  // 1 - beta^step
  bool decoupled;
  bool amsgrad;
};

/// Adagrad as in torch::optim::Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011). State: the sum of squares.
struct AdagradScalars {
  double current_lr;    // lr after decay, for this step; used by the kernels
  double lr, lr_decay;  // used by the foreach update, which has its own step counts
  double eps, weight_decay;
};
/// LAMB (You et al., arXiv:1904.00962, algorithm 2). State: the first and second moments.
struct LambScalars {
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  // 1 - beta^step, or 1
  bool correct_bias;                          // false: both are 1
  bool adapt;
  double trust_ratio;  // norm of the parameter / norm of the step
};
/// LARS (You, Gitman and Ginsburg, arXiv:1708.03888). State: the momentum buffer.
struct LarsScalars {
  double lr, momentum, weight_decay, trust_coefficient, eps;
  bool nesterov, adapt;
  bool first;          // first update: the momentum buffer is set to the step
  double trust_ratio;  // this parameter's learning rate / lr
};
/// Sums of squares of a range of elements. The order of additions depends on `count` alone.
struct SquaredNorms {
  double parameter, step;
};

/// The kernels, compiled for one instruction set. All results have the same bits for every instruction set. All kernels
/// are thread-safe for disjoint ranges, and abort for a dtype that KernelArgs does not list.
struct KernelTable {
  void (*sgd)(const KernelArgs& args, const SgdScalars& scalars);
  void (*adam)(const KernelArgs& args, const AdamScalars& scalars);
  void (*adagrad)(const KernelArgs& args, const AdagradScalars& scalars);
  /// Uses the moments that measure_lamb() has updated; does not read the gradients.
  void (*lamb)(const KernelArgs& args, const LambScalars& scalars);
  void (*lars)(const KernelArgs& args, const LarsScalars& scalars);
  /// Updates the moments. `step` is the sum of squares of the step before it is multiplied by the learning rate.
  SquaredNorms (*measure_lamb)(const KernelArgs& args, const LambScalars& scalars);
  /// Changes nothing. `step` is the sum of squares of the gradient.
  SquaredNorms (*measure_lars)(const KernelArgs& args, const LarsScalars& scalars);
  /// The sum of squares of the gradient. The order of additions depends on `count` alone.
  double (*sum_of_squares)(const KernelArgs& args);

  // These work in place on `count` elements of one tensor, of the dtypes of KernelArgs.
  /// The order of additions depends on `count` alone.
  double (*tensor_sum_of_squares)(at::ScalarType dtype, const void* data, std::size_t count);
  void (*scale)(at::ScalarType dtype, void* data, std::size_t count, double factor);
  /// Clamps to [-max, max]; a NaN stays.
  void (*clamp)(at::ScalarType dtype, void* data, std::size_t count, double max);
  /// average = decay * average + (1 - decay) * data; `average` has state_dtype(dtype).
  void (*update_ema)(at::ScalarType dtype, void* average, const void* data, std::size_t count, double decay);
};

/// The kernels that this process uses (base::simd::best_instruction_set()). Thread-safe.
const KernelTable& kernels();
/// The kernels for `set`, which the CPU must support.
const KernelTable& kernels(base::simd::InstructionSet set);

/// The dtype of the state of a parameter of `dtype`: double for double, otherwise float.
at::ScalarType state_dtype(at::ScalarType dtype);
/// True for the dtypes of KernelArgs.
bool has_kernel(at::ScalarType dtype);

/// Aborts: there is no kernel for `dtype`.
[[noreturn]] void fail_kernel_dtype(at::ScalarType dtype);

// kernels_body.h defines one of these for each instruction set.
namespace baseline {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}

}  // namespace lockstep::optim::kernels
