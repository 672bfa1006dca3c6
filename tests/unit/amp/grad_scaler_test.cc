// Tests scale, skipping, call order, options and state of GradScaler.
#include "lockstep/amp/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/amp/unscaling.h"
#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::amp {
namespace {

using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

at::Tensor parameter(double value, at::ScalarType dtype = at::kFloat) {
  return torch::full({3}, value, at::dtype(dtype)).requires_grad_();
}

template <typename Action>
std::string scaler_error(Action action) {
  return tests::message_of<base::UsageError>(action);
}

struct TrainedModel {
  explicit TrainedModel(const GradScalerOptions& options = {.init_scale = 8, .growth_interval = 2}) : scaler(options) {}
  /// Calls backward() on a scaled loss whose unscaled gradient is `value`.
  void backward(double value) { scaler.scale((weight * value).sum()).backward(); }
  bool step(double value) {
    optimizer.zero_grad();
    backward(value);
    const bool made = scaler.step(optimizer);
    scaler.update();
    return made;
  }
  at::Tensor weight = parameter(1);
  torch::optim::SGD optimizer{{weight}, 0.5};
  GradScaler scaler;
};

TEST(GradScaler, GrowsBacksOffAndSkips) {
  TrainedModel one;
  EXPECT_EQ(one.scaler.get_scale(), 8);
  EXPECT_TRUE(one.step(0.25));
  EXPECT_EQ(one.scaler.get_scale(), 8);
  EXPECT_EQ(one.weight[0].item<float>(), 0.875);
  EXPECT_TRUE(one.step(0.25));
  EXPECT_EQ(one.scaler.get_scale(), 16);
  EXPECT_FALSE(one.step(kInfinity));
  EXPECT_EQ(one.scaler.get_scale(), 8);
  EXPECT_FALSE(one.step(kNan));
  EXPECT_FALSE(one.step(-kInfinity));
  EXPECT_EQ(one.scaler.get_scale(), 2);
  EXPECT_EQ(one.weight[0].item<float>(), 0.75);
}

TEST(GradScaler, UnscaleDividesGradientsInPlace) {
  TrainedModel one;
  one.backward(0.25);
  EXPECT_EQ(one.weight.grad()[1].item<float>(), 2);
  one.backward(0.5);  // accumulates
  one.scaler.unscale_(one.optimizer);
  EXPECT_EQ(one.weight.grad()[1].item<float>(), 0.75);
  torch::nn::utils::clip_grad_value_(one.weight, 0.5);
  EXPECT_TRUE(one.scaler.step(one.optimizer));
  EXPECT_EQ(one.weight[1].item<float>(), 0.75);
}

TEST(GradScaler, ScalesListOfLosses) {
  TrainedModel one;
  const auto losses = one.scaler.scale({torch::tensor(1.0), torch::tensor(3.0), torch::ones({2}, at::kBFloat16)});
  ASSERT_EQ(losses.size(), 3U);
  EXPECT_EQ(losses[1].item<double>(), 24);
  EXPECT_EQ(losses[0].scalar_type(), at::kFloat);
  EXPECT_EQ(losses[2].scalar_type(), at::kBFloat16);
}

TEST(GradScaler, ChecksAllGradientLayoutsAndDtypes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const bool sparse : {false, true}) {
      GradScaler scaler({.init_scale = 4});
      const at::Tensor good = parameter(1), weight = parameter(1, dtype),
                       strided = torch::ones({2, 3}, at::dtype(dtype)).t().requires_grad_();
      torch::optim::SGD optimizer({good, weight, strided, parameter(1)}, 0.5);  // the last one has no gradient
      good.mutable_grad() = torch::ones({3});
      strided.mutable_grad() = torch::ones({2, 3}, at::dtype(dtype)).t();
      at::Tensor gradient = torch::full({3}, 2, at::dtype(dtype));
      const auto of = [&] { return sparse ? gradient.to_sparse() : gradient.clone(); };
      weight.mutable_grad() = of();
      scaler.scale(torch::ones({}));
      scaler.unscale_(optimizer);
      EXPECT_TRUE(torch::equal(weight.grad().to_dense(), gradient / 4)) << dtype;
      EXPECT_TRUE(torch::equal(strided.grad(), torch::full({3, 2}, 0.25, at::dtype(dtype)))) << dtype;
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      gradient[2] = kNan;
      weight.mutable_grad() = of();
      EXPECT_FALSE(scaler.step(optimizer)) << dtype;
    }
  }
}

TEST(GradScaler, SkipsPerOptimizer) {
  TrainedModel one;
  const at::Tensor other = parameter(1);
  torch::optim::SGD second({other}, 0.5);
  one.backward(kInfinity);
  one.scaler.scale(other.sum()).backward();
  EXPECT_FALSE(one.scaler.step(one.optimizer));
  EXPECT_TRUE(one.scaler.step(second));
  one.scaler.update();
  EXPECT_EQ(one.scaler.get_scale(), 4);
  EXPECT_EQ(one.weight[0].item<float>(), 1);
  EXPECT_EQ(other[0].item<float>(), 0.5);
}

TEST(GradScaler, UpdateCountsUnscaledOptimizers) {
  TrainedModel one;
  one.backward(kInfinity);
  one.scaler.unscale_(one.optimizer);
  one.scaler.update();
  EXPECT_EQ(one.scaler.get_scale(), 4);
}

TEST(GradScaler, RejectsCallsOutOfOrder) {
  TrainedModel one;
  EXPECT_THAT(scaler_error([&] { one.scaler.unscale_(one.optimizer); }),
              HasSubstr("unscale_(): no loss has been scaled"));
  EXPECT_THAT(scaler_error([&] { one.scaler.step(one.optimizer); }), HasSubstr("step(): no loss has been scaled"));
  EXPECT_THAT(scaler_error([&] { one.scaler.update(); }), HasSubstr("update(): no loss has been scaled"));
  EXPECT_THAT(scaler_error([&] { one.scaler.update(2); }), HasSubstr("update(): no loss has been scaled"));
  EXPECT_THAT(scaler_error([&] { one.scaler.scale(at::Tensor()); }), HasSubstr("the loss is undefined"));
  one.scaler.scale(torch::ones({}));
  EXPECT_THAT(scaler_error([&] { one.scaler.update(); }), HasSubstr("no optimizer has been stepped or unscaled"));
  EXPECT_THAT(scaler_error([&] { one.scaler.step(one.optimizer); }),
              HasSubstr("no parameter of this optimizer has a gradient"));
  one.backward(0.25);
  one.scaler.unscale_(one.optimizer);
  EXPECT_THAT(scaler_error([&] { one.scaler.unscale_(one.optimizer); }), HasSubstr("called twice for this optimizer"));
  one.scaler.step(one.optimizer);
  EXPECT_THAT(scaler_error([&] { one.scaler.unscale_(one.optimizer); }), HasSubstr("called after step()"));
  EXPECT_THAT(scaler_error([&] { one.scaler.step(one.optimizer); }), HasSubstr("step(): called twice"));
  EXPECT_EQ(one.weight[0].item<float>(), 0.875);
  one.scaler.update();
  EXPECT_TRUE(one.step(0.25));
}

TEST(GradScaler, RejectsFloat16Gradients) {
  GradScaler scaler;
  const at::Tensor weight = parameter(1, at::kHalf);
  torch::optim::SGD optimizer({weight}, 0.5);
  weight.mutable_grad() = torch::ones({3}, at::dtype(at::kHalf));
  scaler.scale(torch::ones({}));
  EXPECT_THAT(scaler_error([&] { scaler.step(optimizer); }), HasSubstr("a gradient is float16"));
}

TEST(GradScaler, RejectsInvalidOptions) {
  EXPECT_THAT(scaler_error([] { GradScaler({.init_scale = 0}); }), HasSubstr("init_scale is 0"));
  EXPECT_THAT(scaler_error([] { GradScaler({.init_scale = kInfinity}); }), HasSubstr("scale is inf"));
  EXPECT_THAT(scaler_error([] { GradScaler({.growth_factor = 1}); }), HasSubstr("growth_factor is 1; expected"));
  EXPECT_THAT(scaler_error([] { GradScaler({.backoff_factor = 1}); }), HasSubstr("backoff_factor is 1; expected"));
  EXPECT_THAT(scaler_error([] { GradScaler({.growth_interval = 0}); }), HasSubstr("growth_interval is 0; expected"));
  EXPECT_THAT(scaler_error([] { GradScaler({.warn_below = -1}); }), HasSubstr("warn_below is -1"));
  GradScaler scaler;
  EXPECT_THAT(scaler_error([&] { scaler.set_growth_factor(0.5); }),
              HasSubstr("set_growth_factor(): growth_factor is 0.5"));
  EXPECT_THAT(scaler_error([&] { scaler.set_backoff_factor(0); }), HasSubstr("backoff_factor is 0"));
  EXPECT_THAT(scaler_error([&] { scaler.set_growth_interval(-1); }), HasSubstr("growth_interval is -1"));
  scaler.scale(torch::ones({}));
  EXPECT_THAT(scaler_error([&] { scaler.update(-2); }), HasSubstr("new_scale is -2"));
  EXPECT_EQ(scaler.get_growth_factor(), 2);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
}

TEST(GradScaler, SettersTakeEffectImmediately) {
  TrainedModel one;
  one.scaler.set_growth_interval(1);
  one.scaler.set_growth_factor(4);
  one.scaler.set_backoff_factor(0.25);
  one.step(0.25);
  EXPECT_EQ(one.scaler.get_scale(), 32);
  one.step(kInfinity);
  EXPECT_EQ(one.scaler.get_scale(), 8);
  one.backward(0.25);
  one.scaler.step(one.optimizer);
  one.scaler.update(1024);
  EXPECT_EQ(one.scaler.get_scale(), 1024);
  EXPECT_TRUE(one.step(0.25));  // no state is left from the previous step
}

TEST(GradScaler, DisabledScalerDoesNothing) {
  TrainedModel one({.enabled = false});
  EXPECT_FALSE(one.scaler.is_enabled());
  EXPECT_EQ(one.scaler.get_scale(), 1);
  one.backward(0.5);
  one.scaler.unscale_(one.optimizer);
  one.scaler.unscale_(one.optimizer);
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 0.5);
  EXPECT_TRUE(one.scaler.step(one.optimizer));
  EXPECT_EQ(one.weight[0].item<float>(), 0.75);
  one.scaler.update();
  one.scaler.update(7);
  EXPECT_EQ(one.scaler.get_scale(), 1);
  EXPECT_TRUE(one.scaler.state_dict().empty());
  one.scaler.load_state_dict({});
  one.scaler.load_state_dict({{"scale", 3.0}});
  EXPECT_EQ(one.scaler.get_scale(), 1);
}

void expect_state(const checkpoint::StateDict& state, const checkpoint::StateDict& expected) {
  ASSERT_EQ(state.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_EQ(state.at(name).index(), value.index()) << name;
    if (const auto* const number = std::get_if<double>(&value)) {
      EXPECT_EQ(std::get<double>(state.at(name)), *number) << name;
    } else {
      EXPECT_EQ(std::get<std::int64_t>(state.at(name)), std::get<std::int64_t>(value)) << name;
    }
  }
}

TEST(GradScaler, ResumesFromStateDict) {
  TrainedModel one;
  one.step(0.25);
  const auto state = one.scaler.state_dict();
  expect_state(state, {{"scale", 8.0},
                       {"growth_factor", 2.0},
                       {"backoff_factor", 0.5},
                       {"growth_interval", std::int64_t{2}},
                       {"_growth_tracker", std::int64_t{1}}});
  for (const bool begun : {false, true}) {
    TrainedModel other({.init_scale = 64});
    if (begun) other.step(0.25);
    other.scaler.load_state_dict(state);
    expect_state(other.scaler.state_dict(), state);
    other.step(0.25);
    EXPECT_EQ(other.scaler.get_scale(), 16) << begun;
  }
  const auto error_with = [&](const std::string& name, const checkpoint::StateValue& value) {
    checkpoint::StateDict broken = state;
    broken[name] = value;
    return scaler_error([&] { one.scaler.load_state_dict(broken); });
  };
  EXPECT_THAT(scaler_error([&] { one.scaler.load_state_dict({}); }), HasSubstr("that of a disabled scaler"));
  EXPECT_THAT(error_with("growth_factor", 0.0), HasSubstr("load_state_dict(): growth_factor is 0"));
  EXPECT_THAT(error_with("backoff_factor", 1.5), HasSubstr("expected more than 0 and less than 1"));
  EXPECT_THAT(error_with("growth_interval", 2.5), HasSubstr("\"growth_interval\" is a number; expected an integer"));
  EXPECT_THAT(error_with("scale", "8"), HasSubstr("\"scale\" is a string; expected a number"));
  EXPECT_THAT(error_with("more", 1.0), HasSubstr("6 entries"));
  checkpoint::StateDict incomplete = state;
  incomplete.erase("scale");
  EXPECT_THAT(scaler_error([&] { one.scaler.load_state_dict(incomplete); }), HasSubstr("no value \"scale\""));
  expect_state(one.scaler.state_dict(), state);
  checkpoint::StateDict from_python = state;
  from_python["scale"] = std::int64_t{8};
  one.scaler.load_state_dict(from_python);
  expect_state(one.scaler.state_dict(), state);
}

TEST(GradScaler, WarnsOnceWhenScaleIsTooSmall) {
  TrainedModel one({.init_scale = 2});
  testing::internal::CaptureStderr();
  one.step(kInfinity);
  one.step(kInfinity);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  one.step(kInfinity);
  one.step(kInfinity);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("the scale has fallen to 0.5, below warn_below (1)"));
  EXPECT_EQ(text.find("warn_below"), text.rfind("warn_below"));
}

/// Records its calls and returns a fixed answer.
class FakeUnscalingOptimizer final : public torch::optim::SGD, public UnscalingOptimizer {
 public:
  using SGD::SGD;
  UnscaleResult answer = UnscaleResult::kFinite;
  std::string calls;
  torch::Tensor step(LossClosure = nullptr) override {
    calls += " step";
    return {};
  }
  UnscaleResult unscale(const at::Tensor& inverse_scale) override {
    calls += " unscale " + std::to_string(inverse_scale.item<double>()).substr(0, 5);
    return answer;
  }
  bool step_unless_found_inf(const at::Tensor&) override { return false; }
  void skip_step() override { calls += " skip"; }
};

TEST(GradScaler, DelegatesToUnscalingOptimizer) {
  TrainedModel one;
  FakeUnscalingOptimizer averaging({one.weight}, torch::optim::SGDOptions(0.1));
  one.backward(1);
  EXPECT_TRUE(one.scaler.step(averaging));
  one.scaler.update();
  EXPECT_EQ(averaging.calls, " unscale 0.125 step");
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 8);
  averaging.answer = UnscaleResult::kNonFinite;
  averaging.calls.clear();
  EXPECT_FALSE(one.scaler.step(averaging));
  one.scaler.update();
  EXPECT_EQ(averaging.calls, " unscale 0.125 skip");
  EXPECT_EQ(one.scaler.get_scale(), 4);
  averaging.answer = UnscaleResult::kUnscaleInPlace;
  EXPECT_TRUE(one.scaler.step(averaging));
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 2);
  one.scaler.update();
  averaging.answer = UnscaleResult::kNoGradients;
  EXPECT_THAT(scaler_error([&] { one.scaler.step(averaging); }),
              HasSubstr("no parameter of this optimizer has a gradient"));
}

}  // namespace
}  // namespace lockstep::amp
