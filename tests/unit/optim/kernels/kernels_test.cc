#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/optim/kernels/kernels_isa.h"

namespace lockstep::optim {
namespace {

/// One set of loops.
struct Loops {
  std::string name;
  void (*sgd)(const Run&, const SgdRule&);
  void (*adam)(const Run&, const AdamRule&);
  double (*sum_of_squares)(const Run&);
  void (*adagrad)(const Run&, const AdagradRule&);
  void (*lamb)(const Run&, const LambRule&);
  void (*lars)(const Run&, const LarsRule&);
  Squares (*measure_lamb)(const Run&, const LambRule&);
  Squares (*measure_lars)(const Run&, const LarsRule&);
  double (*plain_squares)(at::ScalarType, const void*, std::size_t);
  void (*scale)(at::ScalarType, void*, std::size_t, double);
  void (*clamp)(at::ScalarType, void*, std::size_t, double);
  void (*blend)(at::ScalarType, void*, const void*, std::size_t, double);
};
#define LOCKSTEP_LOOPS(name, isa)                                                                               \
  {name,         isa::update,  isa::update,         isa::sum_of_squares, isa::update, isa::update, isa::update, \
   isa::measure, isa::measure, isa::sum_of_squares, isa::scale,          isa::clamp,  isa::blend}

/// Every set that this machine can run.
std::vector<Loops> all_loops() {
  std::vector<Loops> all{LOCKSTEP_LOOPS("baseline", baseline), LOCKSTEP_LOOPS("chosen", optim)};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.push_back(LOCKSTEP_LOOPS("avx2", avx2));
  if (__builtin_cpu_supports("avx512bw")) all.push_back(LOCKSTEP_LOOPS("avx512", avx512));
#endif
  return all;
}

/// A parameter, its states and gradients, the same at each call.
struct Case {
  Case(at::ScalarType dtype, std::int64_t count, int ranks) {
    torch::manual_seed(5);
    parameter = torch::randn({count}).to(dtype);
    for (int i = 0; i < 3; ++i) states.push_back(torch::rand({count}).to(state_dtype(dtype)));
    for (int i = 0; i < ranks; ++i) gradients.push_back(torch::randn({count}).to(dtype));
    for (const at::Tensor& state : states) addresses.push_back(state.data_ptr());
    for (const at::Tensor& gradient : gradients) inputs.push_back(gradient.const_data_ptr());
  }
  Run run() {
    return {.dtype = parameter.scalar_type(),
            .gradients = inputs.data(),
            .num_gradients = inputs.size(),
            .divisor = static_cast<double>(inputs.size()),
            .scale = 0.5,
            .parameter = parameter.data_ptr(),
            .states = addresses.data(),
            .count = static_cast<std::size_t>(parameter.numel())};
  }
  /// As the loops define it: added in order, divided, scaled.
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

constexpr AdamRule kAdam{.lr = 0.01,
                         .beta1 = 0.9,
                         .beta2 = 0.99,
                         .eps = 1e-8,
                         .weight_decay = 0.1,
                         .bias1 = 0.2,
                         .bias2 = 0.1,
                         .decoupled = false,
                         .amsgrad = true};
constexpr SgdRule kSgd{
    .lr = 0.01, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1, .nesterov = false, .first = false};

const at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

TEST(Loops, AreTheSameBitsWhateverTheVectors) {
  for (const at::ScalarType dtype : kDtypes)
    for (const int ranks : {1, 2, 3, 5})
      for (const std::int64_t count : {1, 17, 1024, 3000}) {
        Case first(dtype, count, ranks);
        baseline::update(first.run(), kAdam);
        baseline::update(first.run(), kSgd);
        const double squares = baseline::sum_of_squares(first.run());
        for (const Loops& loops : all_loops()) {
          Case again(dtype, count, ranks);
          loops.adam(again.run(), kAdam);
          loops.sgd(again.run(), kSgd);
          EXPECT_TRUE(torch::equal(first.parameter, again.parameter))
              << loops.name << " " << dtype << " " << ranks << " " << count;
          for (std::size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(torch::equal(first.states[i], again.states[i])) << loops.name << " " << dtype;
          EXPECT_EQ(squares, loops.sum_of_squares(again.run())) << loops.name << " " << dtype << " " << count;
        }
      }
}

constexpr AdagradRule kAdagrad{.rate = 0.01, .lr = 0.01, .lr_decay = 0, .eps = 1e-8, .weight_decay = 0.1};
constexpr LambRule kLamb{.lr = 0.01,
                         .beta1 = 0.9,
                         .beta2 = 0.99,
                         .eps = 1e-8,
                         .weight_decay = 0.1,
                         .bias1 = 0.2,
                         .bias2 = 0.1,
                         .correct_bias = true,
                         .adapt = true,
                         .ratio = 0.3};
constexpr LarsRule kLars{.lr = 0.01,
                         .momentum = 0.9,
                         .weight_decay = 0.1,
                         .trust = 1,
                         .eps = 0,
                         .nesterov = true,
                         .adapt = true,
                         .first = false,
                         .ratio = 0.3};

/// Everything that the other loops compute, of one case.
std::vector<double> run_all(const Loops& loops, Case& one) {
  const Run run = one.run();
  loops.adagrad(run, kAdagrad);
  const Squares lamb = loops.measure_lamb(run, kLamb), lars = loops.measure_lars(run, kLars);
  loops.lamb(run, kLamb);
  loops.lars(run, kLars);
  const at::ScalarType dtype = run.dtype;
  const double squares = loops.plain_squares(dtype, run.parameter, run.count);
  loops.blend(dtype, run.states[2], run.parameter, run.count, 0.9);
  loops.scale(dtype, run.parameter, run.count, 0.7);
  loops.clamp(dtype, run.parameter, run.count, 0.5);
  return {lamb.parameter, lamb.step, lars.parameter, lars.step, squares};
}

TEST(Loops, AllOthersAreTheSameBitsWhateverTheVectors) {
  for (const at::ScalarType dtype : kDtypes)
    for (const int ranks : {1, 2, 3})
      for (const std::int64_t count : {1, 17, 1024, 3000}) {
        Case first(dtype, count, ranks);
        const auto numbers = run_all(all_loops()[0], first);
        EXPECT_LE(first.parameter.abs().max().item<double>(), 0.5);
        for (const Loops& loops : all_loops()) {
          Case again(dtype, count, ranks);
          EXPECT_EQ(run_all(loops, again), numbers) << loops.name << " " << dtype << " " << count;
          EXPECT_TRUE(torch::equal(first.parameter, again.parameter))
              << loops.name << " " << dtype << " " << ranks << " " << count;
          for (std::size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(torch::equal(first.states[i], again.states[i])) << loops.name << " " << dtype;
        }
      }
}

TEST(Loops, SgdIsItsFormula) {
  for (const bool nesterov : {false, true})
    for (const bool first : {false, true}) {
      Case one(at::kDouble, 2050, 3);
      const at::Tensor p = one.parameter.clone(), b = one.states[0].clone();
      const at::Tensor d = one.gradient() + 0.1 * p;
      const at::Tensor momentum = first ? d : 0.9 * b + 0.9 * d;
      SgdRule rule = kSgd;
      rule.nesterov = nesterov;
      rule.first = first;
      update(one.run(), rule);
      EXPECT_TRUE(torch::allclose(one.states[0], momentum, 1e-13, 1e-13));
      EXPECT_TRUE(torch::allclose(one.parameter, p - 0.01 * (nesterov ? d + 0.9 * momentum : momentum), 1e-13, 1e-13));
      EXPECT_TRUE(torch::equal(one.states[1], Case(at::kDouble, 2050, 3).states[1]));
    }
}

TEST(Loops, AdamIsItsFormula) {
  for (const bool decoupled : {false, true})
    for (const bool amsgrad : {false, true}) {
      Case one(at::kDouble, 2050, 2);
      const at::Tensor p = one.parameter.clone();
      const at::Tensor g = decoupled ? one.gradient() : one.gradient() + 0.1 * p;
      const at::Tensor m = 0.9 * one.states[0] + 0.1 * g, v = 0.99 * one.states[1] + 0.01 * g * g;
      const at::Tensor top = amsgrad ? torch::maximum(one.states[2], v) : v;
      const at::Tensor expected =
          (decoupled ? p * (1 - 0.01 * 0.1) : p) - 0.01 / 0.2 * (m / (top.sqrt() / std::sqrt(0.1) + 1e-8));
      AdamRule rule = kAdam;
      rule.decoupled = decoupled;
      rule.amsgrad = amsgrad;
      update(one.run(), rule);
      EXPECT_TRUE(torch::allclose(one.parameter, expected, 1e-12, 1e-12));
      EXPECT_TRUE(torch::allclose(one.states[0], m, 1e-13, 1e-13));
      EXPECT_TRUE(torch::allclose(one.states[1], v, 1e-13, 1e-13));
    }
}

TEST(Loops, SquaresAreThoseOfTheGradient) {
  for (const at::ScalarType dtype : kDtypes)
    for (const int ranks : {1, 2, 4})
      for (const std::int64_t count : {1, 7, 1024, 1031}) {
        Case one(dtype, count, ranks);
        const double expected = one.gradient().to(at::kDouble).pow(2).sum().item<double>();
        EXPECT_NEAR(sum_of_squares(one.run()), expected, 1e-6 * expected) << dtype << " " << ranks << " " << count;
      }
}

}  // namespace
}  // namespace lockstep::optim
