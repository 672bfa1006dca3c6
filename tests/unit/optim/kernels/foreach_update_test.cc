// Tests skipping and bias correction of the foreach updates.
#include "lockstep/optim/kernels/foreach_update.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace lockstep::optim::kernels {
namespace {

/// Two tensors with state, after some updates.
ForeachArgs make_args(std::size_t num_states) {
  at::manual_seed(1);
  ForeachArgs args;
  args.states.resize(num_states);
  for (int i = 0; i < 2; ++i) {
    args.parameters.push_back(at::randn({3, 5}));
    args.gradients.push_back(at::randn({3, 5}));
    for (auto& states : args.states) states.push_back(at::rand({3, 5}));
    args.steps.push_back(at::full({}, 3.0F + static_cast<float>(i)));
  }
  return args;
}

std::vector<at::Tensor> all_of(const ForeachArgs& args) {
  std::vector<at::Tensor> all = args.parameters;
  for (const auto& states : args.states) all.insert(all.end(), states.begin(), states.end());
  all.insert(all.end(), args.steps.begin(), args.steps.end());
  return all;
}

std::vector<at::Tensor> copies_of(const ForeachArgs& args) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : all_of(args)) copies.push_back(tensor.clone());
  return copies;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i], b[i])) return false;
  return a.size() == b.size();
}

template <typename Scalars>
void expect_skips(const Scalars& scalars, std::size_t num_states) {
  ForeachArgs skipped = make_args(num_states), made = make_args(num_states), plain = make_args(num_states);
  skipped.found_inf = at::ones({});
  skipped.gradients[0].view(-1)[2] = std::numeric_limits<float>::infinity();
  made.found_inf = at::zeros({});
  const auto before = copies_of(skipped);
  update(skipped, scalars);
  EXPECT_TRUE(equal(all_of(skipped), before));
  update(made, scalars);
  update(plain, scalars);
  EXPECT_TRUE(equal(all_of(made), all_of(plain)));
  EXPECT_FALSE(equal(all_of(made), before));
  EXPECT_EQ(made.steps[0].item<int>(), 4);
  EXPECT_EQ(made.steps[1].item<int>(), 5);
}

TEST(ForeachArgs, FoundInfLeavesEverythingUnchanged) {
  expect_skips(
      SgdScalars{.lr = 0.1, .momentum = 0.9, .dampening = 0, .weight_decay = 0.1, .nesterov = false, .first = false},
      1);
  expect_skips(
      AdamScalars{
          .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .decoupled = true, .amsgrad = true},
      3);
  expect_skips(AdagradScalars{.current_lr = 0.05, .lr = 0.1, .lr_decay = 0.2, .eps = 1e-8, .weight_decay = 0.1}, 1);
  expect_skips(LambScalars{.lr = 0.1,
                           .beta1 = 0.9,
                           .beta2 = 0.99,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .correct_bias = true,
                           .adapt = true},
               2);
  expect_skips(LarsScalars{.lr = 0.1,
                           .momentum = 0.9,
                           .weight_decay = 0.1,
                           .trust_coefficient = 0.01,
                           .eps = 1e-8,
                           .nesterov = true,
                           .adapt = true,
                           .first = false},
               1);
}

/// Each tensor has its own step count: one of two tensors may have been skipped more often.
TEST(ForeachArgs, BiasCorrectionUsesEachTensorsStepCount) {
  ForeachArgs both = make_args(2), second = make_args(2);
  const LambScalars scalars{
      .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0, .correct_bias = true, .adapt = false};
  for (auto* list : {&second.parameters, &second.gradients, &second.states[0], &second.states[1], &second.steps})
    list->erase(list->begin());
  update(both, scalars);
  update(second, scalars);
  EXPECT_TRUE(at::allclose(both.parameters[1], second.parameters[0], 1e-6, 0));
  const double expected = [&] {
    const ForeachArgs was = make_args(2);
    const double g = was.gradients[0].view(-1)[0].item<double>();
    const double m = 0.9 * was.states[0][0].view(-1)[0].item<double>() + 0.1 * g,
                 v = 0.99 * was.states[1][0].view(-1)[0].item<double>() + 0.01 * g * g;
    return was.parameters[0].view(-1)[0].item<double>() -
           0.1 * m / (1 - std::pow(0.9, 4)) / (std::sqrt(v / (1 - std::pow(0.99, 4))) + 1e-8);
  }();
  EXPECT_NEAR(both.parameters[0].view(-1)[0].item<double>(), expected, 1e-6);
}

}  // namespace
}  // namespace lockstep::optim::kernels
