// Tests the combination of ranks' means and squared deviations.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/nn/sync_batch_norm_function.h"

namespace lockstep::nn {
namespace {

at::Tensor whole_of(const std::vector<at::Tensor>& parts) {
  return torch::cat(parts).to(at::kDouble).transpose(0, 1).flatten(1);
}

Moments combined(const std::vector<at::Tensor>& parts) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& part : parts) rows.push_back(pack_moments(part));
  return combine_moments(torch::stack(rows));
}

TEST(Moments, CombinedMomentsMatchWholeBatch) {
  torch::manual_seed(1);
  const std::vector<at::Tensor> parts = {torch::randn({3, 4, 5}, at::kDouble), torch::randn({0, 4, 5}, at::kDouble),
                                         torch::randn({1, 4, 5}, at::kDouble) + 7,
                                         torch::randn({9, 4, 5}, at::kDouble) * 3};
  const Moments all = combined(parts);
  const at::Tensor whole = whole_of(parts);
  EXPECT_EQ(all.count, 65);
  EXPECT_TRUE(torch::allclose(all.mean, whole.mean(1), 1e-12, 1e-12));
  EXPECT_TRUE(torch::allclose(all.squared_deviations, whole.var(1, /*unbiased=*/false) * 65, 1e-12, 1e-12));
}

TEST(Moments, HandlesOneAndNoValues) {
  const Moments one = combined({torch::zeros({0, 2}), torch::tensor({{3.0F, 4.0F}})});
  EXPECT_EQ(one.count, 1);
  EXPECT_TRUE(torch::equal(one.mean, torch::tensor({3.0, 4.0}, at::kDouble)));
  EXPECT_TRUE(torch::equal(one.squared_deviations, torch::zeros({2}, at::kDouble)));
  EXPECT_EQ(combined({torch::zeros({0, 2})}).count, 0);
}

TEST(Moments, AreStableForLargeMeans) {
  torch::manual_seed(2);
  const std::vector<at::Tensor> parts = {torch::randn({64, 2, 8}) + 1e5, torch::randn({32, 2, 8}) + 1e5};
  const Moments all = combined(parts);
  EXPECT_TRUE(torch::allclose(all.squared_deviations, whole_of(parts).var(1, /*unbiased=*/false) * 768, 1e-3, 0))
      << all.squared_deviations;
}

TEST(Moments, UseFloat32ForHalfPrecision) {
  torch::manual_seed(3);
  const at::Tensor part = (torch::randn({50, 2}) + 10).to(at::kBFloat16);
  const Moments all = combined({part});
  EXPECT_TRUE(torch::allclose(all.mean, part.to(at::kDouble).mean(0), 1e-6, 0));
  EXPECT_EQ(statistics_dtype(at::kBFloat16), at::kFloat);
  EXPECT_EQ(statistics_dtype(at::kDouble), at::kDouble);
}

}  // namespace
}  // namespace lockstep::nn
