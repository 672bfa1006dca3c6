// Compares gradient clipping with torch.
#include "lockstep/optim/clip_grad.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::optim {
namespace {

using Parameters = std::vector<at::Tensor>;

at::Tensor with_gradient(const at::Tensor& gradient) {
  at::Tensor parameter = torch::zeros_like(gradient).requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

/// Small and large parameters in several layouts, one of them without a gradient.
Parameters make(at::ScalarType dtype, bool strided) {
  torch::manual_seed(3);
  Parameters all;
  for (const std::int64_t size : {1, 31, 64, 1000, 70001, 66000})
    all.push_back(with_gradient(torch::randn({size}).to(dtype)));
  all.push_back(with_gradient(torch::randn({30, 50}).to(dtype).t()));
  all.push_back(torch::zeros({3}, torch::requires_grad()));
  all.push_back(with_gradient(torch::zeros({0}).to(dtype)));
  if (strided) all.back().mutable_grad() = torch::zeros({0}).to(dtype);
  if (strided) all.push_back(torch::zeros({40}, dtype).requires_grad_());
  if (strided) all.back().mutable_grad() = torch::randn({80}).to(dtype).slice(0, 0, 80, 2);
  return all;
}

const at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

double tolerance_of(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-6 : 1e-2; }

void expect_gradients(const Parameters& got, const Parameters& expected, double tolerance) {
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i].grad().defined()) {
      EXPECT_TRUE(torch::allclose(got[i].grad(), expected[i].grad(), tolerance, tolerance)) << i;
    }
}

TEST(ClipGradNorm, MatchesTorch) {
  for (const at::ScalarType dtype : kDtypes)
    for (const bool strided : {false, true})
      for (const double limit : {0.5, 1e6}) {
        const Parameters ours = make(dtype, strided), torchs = make(dtype, strided);
        double squares = 0;
        for (const at::Tensor& one : ours)
          if (one.grad().defined()) squares += one.grad().to(at::kDouble).pow(2).sum().item<double>();
        const at::Tensor norm = clip_grad_norm(ours, limit);
        torch::nn::utils::clip_grad_norm_(torchs, limit);
        EXPECT_EQ(norm.scalar_type(), at::kDouble);
        EXPECT_NEAR(norm.item<double>(), std::sqrt(squares), 1e-12 * std::sqrt(squares));
        expect_gradients(ours, torchs, tolerance_of(dtype));
      }
}

TEST(ClipGradNorm, IsBitEqualOnAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  std::vector<double> norms;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    norms.push_back(clip_grad_norm(make(at::kFloat, false), 1).item<double>());
  }
  at::set_num_threads(before);
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_EQ(norms[0], norms[2]);
}

TEST(ClipGradNorm, NonFiniteNormPropagates) {
  const Parameters nan = {with_gradient(torch::tensor({1.0F, std::nanf("")})), with_gradient(torch::ones({3}))};
  EXPECT_TRUE(std::isnan(clip_grad_norm(nan, 1).item<double>()));
  EXPECT_TRUE(torch::isnan(nan[1].grad()).all().item<bool>());
  const Parameters inf = {with_gradient(torch::tensor({1.0F, INFINITY}))};
  EXPECT_TRUE(std::isinf(clip_grad_norm(inf, 1).item<double>()));
  EXPECT_EQ(inf[0].grad()[0].item<float>(), 0);
  EXPECT_EQ(clip_grad_norm({}, 1).item<double>(), 0);
  EXPECT_EQ(clip_grad_norm({torch::ones({3}, torch::requires_grad())}, 1).item<double>(), 0);
}

TEST(ClipGradNorm, BumpsVersionOnlyWhenScaling) {
  const Parameters parameters = {with_gradient(torch::ones({300}))};
  const auto version = [&] { return parameters[0].grad()._version(); };
  const auto before = version();
  clip_grad_norm(parameters, 100);
  EXPECT_EQ(version(), before);  // nothing was written
  clip_grad_norm(parameters, 1);
  EXPECT_GT(version(), before);
}

TEST(Clip, AcceptsAnOptimizerInsteadOfItsParameters) {
  const Parameters list = make(at::kFloat, false), first = make(at::kFloat, false);
  const std::size_t half = first.size() / 2;
  const auto middle = first.begin() + static_cast<std::ptrdiff_t>(half);
  torch::optim::SGD optimizer({{Parameters(first.begin(), middle)}, {Parameters(middle, first.end())}}, 0.1);
  EXPECT_EQ(clip_grad_norm(optimizer, 0.5).item<double>(), clip_grad_norm(list, 0.5).item<double>());
  expect_gradients(first, list, 0);
  clip_grad_value(optimizer, 1e-3);
  clip_grad_value(list, 1e-3);
  expect_gradients(first, list, 0);
}

/// A meta tensor has no values, so code that reads one, which would block on a device, fails.
TEST(Clip, DoesNotSynchronizeWithDevice) {
  const Parameters parameters = {with_gradient(torch::ones({300}, at::kMeta)),
                                 with_gradient(torch::ones({5, 4}, torch::dtype(at::kBFloat16).device(at::kMeta)))};
  EXPECT_TRUE(clip_grad_norm(parameters, 1).is_meta());
  clip_grad_value(parameters, 1);
}

TEST(ClipGradValue, MatchesTorch) {
  for (const at::ScalarType dtype : kDtypes)
    for (const bool strided : {false, true}) {
      const Parameters ours = make(dtype, strided), torchs = make(dtype, strided);
      clip_grad_value(ours, 0.5);
      torch::nn::utils::clip_grad_value_(torchs, 0.5);
      expect_gradients(ours, torchs, 0);
    }
  const Parameters nan = {with_gradient(torch::tensor({std::nanf(""), 7.0F, -7.0F}))};
  clip_grad_value(nan, 2);
  EXPECT_TRUE(std::isnan(nan[0].grad()[0].item<float>()));
  EXPECT_EQ(nan[0].grad()[1].item<float>(), 2);
  EXPECT_EQ(nan[0].grad()[2].item<float>(), -2);
}

TEST(Clip, RejectsInvalidArguments) {
  const auto refuses = [](const std::string& text, const std::function<void()>& call) {
    EXPECT_THAT(tests::message_of<base::UsageError>(call),
                ::testing::AllOf(::testing::HasSubstr(text), ::testing::HasSubstr("expected")));
  };
  const Parameters parameters = {with_gradient(torch::ones({3}))};
  refuses("max_norm is 0", [&] { clip_grad_norm(parameters, 0); });
  refuses("max is -1", [&] { clip_grad_value(parameters, -1); });
  at::Tensor sparse = torch::zeros({3, 2}).requires_grad_();
  sparse.mutable_grad() = torch::ones({3, 2}).to_sparse();
  refuses("parameter 1 is sparse", [&] { clip_grad_norm({parameters[0], sparse}, 1); });
  refuses("on meta", [&] { clip_grad_value({parameters[0], with_gradient(torch::ones({3}, at::kMeta))}, 1); });
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::ones({3})));
}

}  // namespace
}  // namespace lockstep::optim
