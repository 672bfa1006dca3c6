// What optimizers do to a run of elements, in one pass over gradients, parameter and state.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

namespace lockstep::optim {

/// `count` elements of a parameter, of its state, and of the gradients of the ranks that have one, each contiguous. The
/// dtypes are float, double, bfloat16 and half; gradients have the parameter's. State is of double for double, else of
/// float.
struct KernelArgs {
  at::ScalarType dtype;
  const void* const* gradients;
  std::size_t num_gradients;
  double divisor = 1;            // the gradient is their sum, added in this order, divided by it
  double scale = 1;              // and then multiplied by this
  double max = __builtin_inf();  // and what is beyond [-max, max] becomes the nearer end; a NaN stays
  void* parameter;
  void* const* states;
  std::size_t count;
};

/// torch::optim::SGD's. One state, the momentum, if `momentum` is not 0.
struct SgdScalars {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  bool first;  // the momentum becomes the gradient
};
/// torch::optim::Adam's, after Kingma and Ba, arXiv:1412.6980; `decoupled`: AdamW's, after Loshchilov and Hutter,
/// arXiv:1711.05101. States are the two moments and, with amsgrad (Reddi, Kale and Kumar, arXiv:1904.09237), the
/// greatest second one.
struct AdamScalars {
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  // 1 - beta^step
  bool decoupled;
  bool amsgrad;
};

/// torch::optim::Adagrad's, after Duchi, Hazan and Singer, JMLR 12 (2011). The state is the sum of squares.
struct AdagradScalars {
  double current_lr;    // of this step
  double lr, lr_decay;  // what it comes from
  double eps, weight_decay;
};
/// After You et al., arXiv:1904.00962, algorithm 2. States are the two moments.
struct LambScalars {
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  // 1 - beta^step, or 1
  bool correct_bias;                          // which says the same
  bool adapt;
  double trust_ratio;  // of the norms of parameter and step
};
/// After You, Gitman and Ginsburg, arXiv:1708.03888. The state is the momentum.
struct LarsScalars {
  double lr, momentum, weight_decay, trust_coefficient, eps;
  bool nesterov, adapt;
  bool first;          // the momentum becomes the step
  double trust_ratio;  // of this parameter's rate to lr
};
/// Sums of squares of a run, added in an order that depends on `count` alone.
struct SquaredNorms {
  double parameter, step;
};

// They use the widest vectors that this machine has; the bits are the same with all.
void update(const KernelArgs& args, const SgdScalars& scalars);
void update(const KernelArgs& args, const AdamScalars& scalars);
void update(const KernelArgs& args, const AdagradScalars& scalars);
/// From the moments, which measure() has updated; gradients are not read.
void update(const KernelArgs& args, const LambScalars& scalars);
void update(const KernelArgs& args, const LarsScalars& scalars);
/// Updates the moments. `step` is of what the rate is multiplied with.
SquaredNorms measure_norms(const KernelArgs& args, const LambScalars& scalars);
/// Changes nothing. `step` is of the gradient.
SquaredNorms measure_norms(const KernelArgs& args, const LarsScalars& scalars);
/// Of the gradient, added in an order that depends on `count` alone.
double sum_of_squares(const KernelArgs& args);

// Over `count` elements of one tensor, of the dtypes of a KernelArgs.
/// Added in an order that depends on `count` alone.
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
/// Into [-max, max]; a NaN stays.
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
/// average = keep * average + (1 - keep) * data; `average` is of state_dtype(dtype).
void update_ema(at::ScalarType dtype, void* average, const void* data, std::size_t count, double keep);

/// The dtype of the state of a parameter of `dtype`.
at::ScalarType state_dtype(at::ScalarType dtype);

}  // namespace lockstep::optim
