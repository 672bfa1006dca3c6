// Compares the kernels of all instruction sets with each other and with formulas.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/optim/kernels/kernels_isa.h"

namespace lockstep::optim {
namespace {

/// The kernels of one instruction set.
struct KernelSet {
  std::string name;
  void (*sgd)(const KernelArgs&, const SgdScalars&);
  void (*adam)(const KernelArgs&, const AdamScalars&);
  double (*sum_of_squares)(const KernelArgs&);
  void (*adagrad)(const KernelArgs&, const AdagradScalars&);
  void (*lamb)(const KernelArgs&, const LambScalars&);
  void (*lars)(const KernelArgs&, const LarsScalars&);
  SquaredNorms (*measure_lamb)(const KernelArgs&, const LambScalars&);
  SquaredNorms (*measure_lars)(const KernelArgs&, const LarsScalars&);
  double (*tensor_sum_of_squares)(at::ScalarType, const void*, std::size_t);
  void (*scale)(at::ScalarType, void*, std::size_t, double);
  void (*clamp)(at::ScalarType, void*, std::size_t, double);
  void (*update_ema)(at::ScalarType, void*, const void*, std::size_t, double);
};
#define LOCKSTEP_OPTIMIZER_KERNELS(name, isa)                                              \
  {name,        isa::update, isa::update,        isa::sum_of_squares, isa::update,         \
   isa::update, isa::update, isa::measure_norms, isa::measure_norms,  isa::sum_of_squares, \
   isa::scale,  isa::clamp,  isa::update_ema}

/// Returns the kernels of every instruction set that this processor supports.
std::vector<KernelSet> all_kernels() {
  std::vector<KernelSet> all{LOCKSTEP_OPTIMIZER_KERNELS("baseline", baseline),
                             LOCKSTEP_OPTIMIZER_KERNELS("chosen", optim)};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.push_back(LOCKSTEP_OPTIMIZER_KERNELS("avx2", avx2));
  if (__builtin_cpu_supports("avx512bw")) all.push_back(LOCKSTEP_OPTIMIZER_KERNELS("avx512", avx512));
#endif
  return all;
}

/// A parameter with its states and gradients. Equal arguments of the constructor give equal values.
struct KernelCase {
  KernelCase(at::ScalarType dtype, std::int64_t count, int ranks) {
    torch::manual_seed(5);
    parameter = torch::randn({count}).to(dtype);
    for (int i = 0; i < 3; ++i) states.push_back(torch::rand({count}).to(state_dtype(dtype)));
    for (int i = 0; i < ranks; ++i) gradients.push_back(torch::randn({count}).to(dtype));
    for (const at::Tensor& state : states) addresses.push_back(state.data_ptr());
    for (const at::Tensor& gradient : gradients) inputs.push_back(gradient.const_data_ptr());
  }
  KernelArgs args() {
    return {.dtype = parameter.scalar_type(),
            .gradients = inputs.data(),
            .num_gradients = inputs.size(),
            .divisor = static_cast<double>(inputs.size()),
            .scale = 0.5,
            .parameter = parameter.data_ptr(),
            .states = addresses.data(),
            .count = static_cast<std::size_t>(parameter.numel())};
  }
  /// Returns the gradient as the kernels define it: the sum in order, divided and scaled.
  at::Tensor gradient() const {
    at::Tensor sum = gradients[0].to(states[0].scalar_type());
    for (std::size_t i = 1; i < gradients.size(); ++i) sum = sum + gradients[i].to(sum.scalar_type());
    return sum / static_cast<double>(gradients.size()) * 0.5;
  }
  at::Tensor parameter;
  std::vector<at::Tensor> states, gradients;
  std::vector<void*> addresses;
  std::vector<const void*> inputs;
};

constexpr AdamScalars kAdam{.lr = 0.01,
                            .beta1 = 0.9,
                            .beta2 = 0.99,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .bias_correction1 = 0.2,
                            .bias_correction2 = 0.1,
                            .decoupled = false,
                            .amsgrad = true};
constexpr SgdScalars kSgd{
    .lr = 0.01, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1, .nesterov = false, .first = false};

const at::ScalarType kKernelDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

TEST(Kernels, SgdAndAdamAreBitEqualOnAllInstructionSets) {
  for (const at::ScalarType dtype : kKernelDtypes)
    for (const int ranks : {1, 2, 3, 5})
      for (const std::int64_t count : {1, 17, 1024, 3000}) {
        KernelCase first(dtype, count, ranks);
        baseline::update(first.args(), kAdam);
        baseline::update(first.args(), kSgd);
        const double squares = baseline::sum_of_squares(first.args());
        for (const KernelSet& kernels : all_kernels()) {
          KernelCase again(dtype, count, ranks);
          kernels.adam(again.args(), kAdam);
          kernels.sgd(again.args(), kSgd);
          EXPECT_TRUE(torch::equal(first.parameter, again.parameter))
              << kernels.name << " " << dtype << " " << ranks << " " << count;
          for (std::size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(torch::equal(first.states[i], again.states[i])) << kernels.name << " " << dtype;
          EXPECT_EQ(squares, kernels.sum_of_squares(again.args())) << kernels.name << " " << dtype << " " << count;
        }
      }
}

constexpr AdagradScalars kAdagrad{.current_lr = 0.01, .lr = 0.01, .lr_decay = 0, .eps = 1e-8, .weight_decay = 0.1};
constexpr LambScalars kLamb{.lr = 0.01,
                            .beta1 = 0.9,
                            .beta2 = 0.99,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .bias_correction1 = 0.2,
                            .bias_correction2 = 0.1,
                            .correct_bias = true,
                            .adapt = true,
                            .trust_ratio = 0.3};
constexpr LarsScalars kLars{.lr = 0.01,
                            .momentum = 0.9,
                            .weight_decay = 0.1,
                            .trust_coefficient = 1,
                            .eps = 0,
                            .nesterov = true,
                            .adapt = true,
                            .first = false,
                            .trust_ratio = 0.3};

/// Runs all kernels except the updates for one case. Returns their results.
std::vector<double> run_all(const KernelSet& kernels, KernelCase& one) {
  const KernelArgs args = one.args();
  kernels.adagrad(args, kAdagrad);
  const SquaredNorms lamb = kernels.measure_lamb(args, kLamb), lars = kernels.measure_lars(args, kLars);
  kernels.lamb(args, kLamb);
  kernels.lars(args, kLars);
  const at::ScalarType dtype = args.dtype;
  const double squares = kernels.tensor_sum_of_squares(dtype, args.parameter, args.count);
  kernels.update_ema(dtype, args.states[2], args.parameter, args.count, 0.9);
  kernels.scale(dtype, args.parameter, args.count, 0.7);
  kernels.clamp(dtype, args.parameter, args.count, 0.5);
  return {lamb.parameter, lamb.step, lars.parameter, lars.step, squares};
}

TEST(Kernels, OtherKernelsAreBitEqualOnAllInstructionSets) {
  for (const at::ScalarType dtype : kKernelDtypes)
    for (const int ranks : {1, 2, 3})
      for (const std::int64_t count : {1, 17, 1024, 3000}) {
        KernelCase first(dtype, count, ranks);
        const auto numbers = run_all(all_kernels()[0], first);
        EXPECT_LE(first.parameter.abs().max().item<double>(), 0.5);
        for (const KernelSet& kernels : all_kernels()) {
          KernelCase again(dtype, count, ranks);
          EXPECT_EQ(run_all(kernels, again), numbers) << kernels.name << " " << dtype << " " << count;
          EXPECT_TRUE(torch::equal(first.parameter, again.parameter))
              << kernels.name << " " << dtype << " " << ranks << " " << count;
          for (std::size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(torch::equal(first.states[i], again.states[i])) << kernels.name << " " << dtype;
        }
      }
}

TEST(Kernels, SgdMatchesFormula) {
  for (const bool nesterov : {false, true})
    for (const bool first : {false, true}) {
      KernelCase one(at::kDouble, 2050, 3);
      const at::Tensor p = one.parameter.clone(), b = one.states[0].clone();
      const at::Tensor d = one.gradient() + 0.1 * p;
      const at::Tensor momentum = first ? d : 0.9 * b + 0.9 * d;
      SgdScalars scalars = kSgd;
      scalars.nesterov = nesterov;
      scalars.first = first;
      update(one.args(), scalars);
      EXPECT_TRUE(torch::allclose(one.states[0], momentum, 1e-13, 1e-13));
      EXPECT_TRUE(torch::allclose(one.parameter, p - 0.01 * (nesterov ? d + 0.9 * momentum : momentum), 1e-13, 1e-13));
      EXPECT_TRUE(torch::equal(one.states[1], KernelCase(at::kDouble, 2050, 3).states[1]));
    }
}

TEST(Kernels, AdamMatchesFormula) {
  for (const bool decoupled : {false, true})
    for (const bool amsgrad : {false, true}) {
      KernelCase one(at::kDouble, 2050, 2);
      const at::Tensor p = one.parameter.clone();
      const at::Tensor g = decoupled ? one.gradient() : one.gradient() + 0.1 * p;
      const at::Tensor m = 0.9 * one.states[0] + 0.1 * g, v = 0.99 * one.states[1] + 0.01 * g * g;
      const at::Tensor top = amsgrad ? torch::maximum(one.states[2], v) : v;
      const at::Tensor expected =
          (decoupled ? p * (1 - 0.01 * 0.1) : p) - 0.01 / 0.2 * (m / (top.sqrt() / std::sqrt(0.1) + 1e-8));
      AdamScalars scalars = kAdam;
      scalars.decoupled = decoupled;
      scalars.amsgrad = amsgrad;
      update(one.args(), scalars);
      EXPECT_TRUE(torch::allclose(one.parameter, expected, 1e-12, 1e-12));
      EXPECT_TRUE(torch::allclose(one.states[0], m, 1e-13, 1e-13));
      EXPECT_TRUE(torch::allclose(one.states[1], v, 1e-13, 1e-13));
    }
}

TEST(Kernels, SumOfSquaresMatchesGradient) {
  for (const at::ScalarType dtype : kKernelDtypes)
    for (const int ranks : {1, 2, 4})
      for (const std::int64_t count : {1, 7, 1024, 1031}) {
        KernelCase one(dtype, count, ranks);
        const double expected = one.gradient().to(at::kDouble).pow(2).sum().item<double>();
        EXPECT_NEAR(sum_of_squares(one.args()), expected, 1e-6 * expected) << dtype << " " << ranks << " " << count;
      }
}

}  // namespace
}  // namespace lockstep::optim
