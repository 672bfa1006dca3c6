// Compares the kernels of all instruction sets with each other and with formulas.
#include "lockstep/optim/kernels/kernels.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::optim::kernels {
namespace {

struct NamedKernels {
  std::string name;
  const KernelTable& table;
};

/// Returns the kernels of every instruction set that this CPU supports, the baseline first.
std::vector<NamedKernels> all_kernels() {
  std::vector<NamedKernels> all;
  for (const base::simd::InstructionSet set : base::simd::supported_instruction_sets())
    all.push_back({base::simd::name(set), kernels(set)});
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
        baseline::kTable.adam(first.args(), kAdam);
        baseline::kTable.sgd(first.args(), kSgd);
        const double squares = baseline::kTable.sum_of_squares(first.args());
        for (const auto& [name, table] : all_kernels()) {
          KernelCase again(dtype, count, ranks);
          table.adam(again.args(), kAdam);
          table.sgd(again.args(), kSgd);
          EXPECT_TRUE(torch::equal(first.parameter, again.parameter))
              << name << " " << dtype << " " << ranks << " " << count;
          for (std::size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(torch::equal(first.states[i], again.states[i])) << name << " " << dtype;
          EXPECT_EQ(squares, table.sum_of_squares(again.args())) << name << " " << dtype << " " << count;
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
std::vector<double> run_all(const KernelTable& table, KernelCase& one) {
  const KernelArgs args = one.args();
  table.adagrad(args, kAdagrad);
  const SquaredNorms lamb = table.measure_lamb(args, kLamb), lars = table.measure_lars(args, kLars);
  table.lamb(args, kLamb);
  table.lars(args, kLars);
  const at::ScalarType dtype = args.dtype;
  const double squares = table.tensor_sum_of_squares(dtype, args.parameter, args.count);
  table.update_ema(dtype, args.states[2], args.parameter, args.count, 0.9);
  table.scale(dtype, args.parameter, args.count, 0.7);
  table.clamp(dtype, args.parameter, args.count, 0.5);
  return {lamb.parameter, lamb.step, lars.parameter, lars.step, squares};
}

TEST(Kernels, OtherKernelsAreBitEqualOnAllInstructionSets) {
  for (const at::ScalarType dtype : kKernelDtypes)
    for (const int ranks : {1, 2, 3})
      for (const std::int64_t count : {1, 17, 1024, 3000}) {
        KernelCase first(dtype, count, ranks);
        const auto numbers = run_all(baseline::kTable, first);
        EXPECT_LE(first.parameter.abs().max().item<double>(), 0.5);
        for (const auto& [name, table] : all_kernels()) {
          KernelCase again(dtype, count, ranks);
          EXPECT_EQ(run_all(table, again), numbers) << name << " " << dtype << " " << count;
          EXPECT_TRUE(torch::equal(first.parameter, again.parameter))
              << name << " " << dtype << " " << ranks << " " << count;
          for (std::size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(torch::equal(first.states[i], again.states[i])) << name << " " << dtype;
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
      kernels().sgd(one.args(), scalars);
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
      kernels().adam(one.args(), scalars);
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
        EXPECT_NEAR(kernels().sum_of_squares(one.args()), expected, 1e-6 * expected)
            << dtype << " " << ranks << " " << count;
      }
}

TEST(Kernels, ProcessUsesOneOfTheSupportedTables) {
  EXPECT_EQ(&kernels(), &kernels(base::simd::best_instruction_set()));
}

TEST(KernelsDeathTest, DtypeWithoutKernelAborts) {
  KernelCase one(at::kFloat, 4, 1);
  KernelArgs args = one.args();
  args.dtype = at::kLong;
  for (const auto& [name, table] : all_kernels()) {
    EXPECT_DEATH(table.sgd(args, kSgd), "no optimizer kernel for Long") << name;
    EXPECT_DEATH(table.scale(at::kInt, one.parameter.data_ptr(), 4, 2), "no optimizer kernel for Int") << name;
  }
}

}  // namespace
}  // namespace lockstep::optim::kernels
